"""Messages between ranks as JSON and the bytes of arrays; neither can carry code."""

import json
import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from PIL import Image

LENGTH_FORMAT = struct.Struct("!Q")
SIMPLE = (int, float, str, bool, type(None))


class Codec:
    """Converts objects of some classes, and what they contain, to bytes and back."""

    def __init__(self, *kinds: type):
        """Set up the conversion of instances of dataclasses and named tuples."""
        self.kinds = {kind.__name__: kind for kind in kinds}

    def dump(self, message: Any) -> list[bytes]:
        """Return the pieces of a message, to be sent one after the other."""
        buffers: list[bytes] = []
        content = self._encode(message, buffers)
        head = json.dumps([content, [len(each) for each in buffers]]).encode()
        return [LENGTH_FORMAT.pack(len(head)), head, *buffers]

    def load(self, read: Callable[[int], bytes]) -> Any:
        """Read the next message; `read` returns that many bytes, or raises EOFError."""
        (size,) = LENGTH_FORMAT.unpack(read(LENGTH_FORMAT.size))
        content, sizes = json.loads(read(size))
        return self._decode(content, [read(each) for each in sizes])

    def _encode(self, value: Any, buffers: list[bytes]) -> Any:
        kind = type(value)
        if kind in SIMPLE:
            return value
        if kind is list:
            simple = all(type(each) in SIMPLE for each in value)
            return value if simple else [self._encode(each, buffers) for each in value]
        if kind is dict:
            return {
                "dict": {str(name): self._encode(each, buffers) for name, each in value.items()}
            }

        if kind.__name__ in self.kinds:
            # Both ends know this record by name.
            values = value
            if is_dataclass(value):
                values = [getattr(value, field.name) for field in fields(value)]
            return {kind.__name__: [self._encode(each, buffers) for each in values]}

        if kind is tuple:
            return {"tuple": [self._encode(each, buffers) for each in value]}
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return {
                "array": [value.dtype.str, list(value.shape), self._add(value.tobytes(), buffers)]
            }
        if isinstance(value, Image.Image):
            return {"image": [value.mode, list(value.size), self._add(value.tobytes(), buffers)]}
        raise TypeError(f"a {kind.__name__} cannot be sent to another rank")

    @staticmethod
    def _add(content: bytes, buffers: list[bytes]) -> int:
        buffers.append(content)
        return len(buffers) - 1

    def _decode(self, content: Any, buffers: list[bytes]) -> Any:
        if isinstance(content, list):
            if all(type(each) in SIMPLE for each in content):
                return content
            return [self._decode(each, buffers) for each in content]
        if not isinstance(content, dict):
            return content

        # Whatever JSON has no value for is an object with one entry: kind and content.
        ((name, inner),) = content.items()
        match name:
            case "dict":
                return {key: self._decode(each, buffers) for key, each in inner.items()}
            case "tuple":
                return tuple(self._decode(inner, buffers))
            case "array":
                kind, shape, index = inner
                return np.frombuffer(bytearray(buffers[index]), np.dtype(kind)).reshape(shape)
            case "image":
                mode, size, index = inner
                return Image.frombytes(mode, tuple(size), buffers[index])
        return self.kinds[name](*self._decode(inner, buffers))
