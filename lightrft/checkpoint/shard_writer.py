"""Streaming writer of safetensors files for several ranks, none of which keeps a tensor in memory.

A file consists of the length of a JSON header (8 bytes), the header, which may be padded with spaces, and the bytes of the
tensors. Space for the header is therefore reserved at first, and the header is written when all tensors are known.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightrft.checkpoint.atomic import naming, write_file
from lightrft.models.weight_files import INDEX, NAME
from lightrft.parallel.collectives import Axis

HEADER_BYTES = 128 * 1024
"""Bytes reserved for the header, enough for about a thousand tensors; further tensors go to another file."""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class ShardWriter:
    """Writer of files with at most `max_bytes` of tensors; a larger tensor has a file of its own.

    All ranks add the same tensors in the same order, and write the files in turn. The tensors of one file have elements of equal
    size, so that all are aligned.
    """

    def __init__(self, folder: Path, max_bytes: int, world: Axis):
        self.folder, self.max_bytes, self.world = folder, max_bytes, world
        self.headers: list[dict[str, Any]] = []
        """Header of each file: tensor name -> dtype, shape and offsets."""
        self.num_bytes = self.header_bytes = self.itemsize = self.total_bytes = 0
        self._file: BinaryIO | None = None
        self._failure: Exception | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. An error is kept for finish(), because other ranks take part in the stream, which must not end here."""
        entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        size = len(json.dumps({name: entry})) + 80  # plus its offsets
        full = self.num_bytes + tensor.nbytes > self.max_bytes or self.header_bytes + size > HEADER_BYTES
        if not self.headers or full or tensor.itemsize != self.itemsize:
            self._begin(tensor.itemsize)
        self.headers[-1][name] = entry | {"data_offsets": [self.num_bytes, self.num_bytes + tensor.nbytes]}
        self.num_bytes, self.total_bytes = self.num_bytes + tensor.nbytes, self.total_bytes + tensor.nbytes
        self.header_bytes += size
        if self._file is not None:
            self._try(lambda: self._file.write(_bytes_of(tensor)))

    def finish(self) -> None:
        """Close the last file; raise the first error of this rank, if there was one."""
        self._end()
        if self._failure is not None:
            raise self._failure

    def name_files(self) -> None:
        """Rename the files to their final names, which contain their number, and write the index if there are several.

        Called on one rank after all ranks have finished.
        """
        count = len(self.headers)
        names = [NAME] if count == 1 else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(names):
            self._path(number).rename(self.folder / name)
        if count > 1:
            weight_map = {tensor: name for name, header in zip(names, self.headers, strict=True) for tensor in header}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            write_file(self.folder / INDEX, json.dumps(index, indent=2).encode())

    def _begin(self, itemsize: int) -> None:
        self._end()
        number = len(self.headers)
        self.headers.append({})
        self.num_bytes, self.header_bytes, self.itemsize = 0, 0, itemsize
        if number % self.world.size == self.world.rank:
            self._try(lambda: self._open(self._path(number)))

    def _open(self, path: Path) -> None:
        self._file = open(path, "wb")
        self._file.seek(8 + HEADER_BYTES)

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._try(lambda: self._close(file))

    def _close(self, file: BinaryIO) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}} | self.headers[-1]).encode()
        with file:
            file.seek(0)
            file.write(HEADER_BYTES.to_bytes(8, "little") + header.ljust(HEADER_BYTES))
            file.flush()
            os.fsync(file.fileno())

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.tmp"

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            with naming(self.folder):
                action()
        except Exception as error:
            self._failure = self._failure or error


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
