"""Images in the data: files of a row, and their pixels, which are read only when needed."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from lightrft.config.errors import DataError

IMAGES = "images"
"""Key of the images in prompts and requests."""
IMAGE_PLACEHOLDER = "<image>"
"""Placeholder of an image in the text of a row that becomes a chat."""
ORIENTATION = 0x0112
"""EXIF tag of the orientation of an image; values from 5 on include a rotation by 90 degrees."""
THUMBNAIL = 160
"""Longer side of a thumbnail in pixels: a JPEG of about 5 kB, never more than about 30 kB."""
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""Exceptions that PIL raises for damaged files, and for files with too many pixels."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """Image file that is read each time it is needed."""

    name: str
    """Name of the image in the data."""
    source: Path | bytes
    """Path of the file, or its contents."""

    @property
    def size(self) -> tuple[int, int]:
        """Return width and height, upright. Only the start of the file is read. Raise ValueError if it cannot be read."""
        try:
            with _of_bytes(BytesIO(self.source) if isinstance(self.source, bytes) else _regular(self.source)) as image:
                turned = Image.Image.getexif(image).get(ORIENTATION, 1) >= 5  # PNG's own getexif would decode the whole image
                return image.size[::-1] if turned else image.size
        except UNREADABLE as error:
            raise ValueError(f"image {self.name} cannot be read: {error}") from error

    def open(self) -> Image.Image:
        """Return the image in RGB, without transparency, and upright. Raise DataError if it cannot be read."""
        try:
            content = self.source if isinstance(self.source, bytes) else _regular(self.source).read_bytes()
            return ImageOps.exif_transpose(_of_bytes(BytesIO(content))).convert("RGB")
        except UNREADABLE as error:
            raise DataError(f"image {self.name} cannot be read: {error}; repair it, or remove its rows from the data") from error

    def thumbnail(self) -> str:
        """Return a small JPEG of the image as a data URI, which a page shows without loading anything."""
        image, file = self.open(), BytesIO()
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        image.save(file, "JPEG", quality=75)
        return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def image_files(value: Any, folder: Path, *, root: Path | None = None) -> list[ImageFile]:
    """Return the images of a row's column: one or more paths relative to `folder`, or images of `datasets`; None is no image.

    With a `root`, paths are relative to it instead; raise ValueError for a path outside of it, and for values of other types.
    """
    items = [] if value is None else value if isinstance(value, list | tuple) else [value]
    return [_image_file(item, folder, root) for item in items]


def opened(multi_modal: Mapping[str, list]) -> dict[str, list]:
    """Open all media of a prompt, in the form that an engine takes."""
    return {medium: [item.open() for item in items] for medium, items in multi_modal.items()}


def with_parts(messages: list[dict[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """Return chat messages whose contents are parts of text and images, as the templates of processors require.

    An image replaces each mark in the texts; without marks, all images precede the text of the first user message. Raise
    ValueError for content of another type.
    """
    messages = [message | {"content": _parts(message.get("content"))} for message in messages]
    marked = any(part.get("type") == "image" for message in messages for part in message["content"])
    for message in messages:
        if message.get("role") == "user" and not marked:
            message["content"] = [{"type": "image"}] * num_images + message["content"]
            marked = True
    return messages


def _parts(content: Any) -> list[dict[str, Any]]:
    if content is None or (isinstance(content, list) and all(isinstance(part, dict) for part in content)):
        return list(content or ())
    if not isinstance(content, str):
        raise ValueError(f"the content of a chat message must be text, or a list of parts with a type, not {content!r:.80}")
    texts = content.split(IMAGE_PLACEHOLDER)
    parts = [part for text in texts for part in ({"type": "text", "text": text}, {"type": "image"})][:-1]
    return [part for part in parts if part != {"type": "text", "text": ""}]


def _of_bytes(file: BytesIO | Path) -> Image.Image:
    """Open an image. Raise ValueError for more than 8 bits per channel: in RGB, nearly all of its pixels would be white."""
    image = Image.open(file)
    if image.mode[0] in "IF":
        raise ValueError(f"its pixels have mode {image.mode}, not 8 bits; scale them")
    return image


def _regular(file: Path) -> Path:
    """Return the file. Raise ValueError for a pipe or a device, which may never end."""
    if file.exists() and not file.is_file():
        raise ValueError("not a regular file")
    return file


def _image_file(item: Any, folder: Path, root: Path | None) -> ImageFile:
    if isinstance(item, str) and item:
        path = (root or folder) / Path(item).expanduser()
        if root is not None and not path.resolve().is_relative_to(root.resolve()):
            raise ValueError(f"image {item} is not in --media_root {root}")
        return ImageFile(item, path)
    if isinstance(item, dict) and (content := item.get("bytes")):
        return ImageFile(item.get("path") or "inside the data", content)
    if isinstance(item, dict) and item.get("path"):
        return _image_file(item["path"], folder, root)
    raise ValueError(f"an image must be a path, or an image of the datasets package, not {item!r:.80}")
