"""Images in the data: where a row has them, and their pixels when these are needed."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from lightrft.data.readers import DataError

IMAGES = "images"
"""Where prompts and requests have them."""
MARK = "<image>"
"""Where one stands in the text of a row that becomes a chat."""
ORIENTATION = 0x0112
"""In the EXIF data of an image: how it is to be turned; from 5 on by a quarter."""
THUMBNAIL = 160
"""The longer side of a thumbnail in pixels: as JPEG some 5 kB, never more than about 30."""
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What PIL raises for damaged files, and for those with more pixels than it takes."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image that is read when it is needed, as often as that is."""

    name: str
    """As the data has it."""
    source: Path | bytes
    """Its file, or what would be in it."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, upright. Only the file's beginning is read; ValueError where that is of no image."""
        try:
            with _of_bytes(BytesIO(self.source) if isinstance(self.source, bytes) else _regular(self.source)) as image:
                turned = Image.Image.getexif(image).get(ORIENTATION, 1) >= 5  # that of a PNG would decode all of it
                return image.size[::-1] if turned else image.size
        except UNREADABLE as error:
            raise ValueError(f"image {self.name} cannot be read: {error}") from error

    def open(self) -> Image.Image:
        """In RGB, transparency dropped, and upright. DataError where it cannot be read."""
        try:
            content = self.source if isinstance(self.source, bytes) else _regular(self.source).read_bytes()
            return ImageOps.exif_transpose(_of_bytes(BytesIO(content))).convert("RGB")
        except UNREADABLE as error:
            raise DataError(f"image {self.name} cannot be read: {error}; mend it, or take its rows out of the data") from error

    def thumbnail(self) -> str:
        """Return a small JPEG of it as a data URI, which a page shows without loading anything."""
        image, file = self.open(), BytesIO()
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        image.save(file, "JPEG", quality=75)
        return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def image_files(value: Any, folder: Path, *, root: Path | None = None) -> list[ImageFile]:
    """Of a row's column: a path or several, relative to `folder`, or what `datasets` makes of an image; None is no image.

    With a `root`, paths are relative to that instead, and ValueError for one that leads out of it.
    """
    items = [] if value is None else value if isinstance(value, list | tuple) else [value]
    return [_image_file(item, folder, root) for item in items]


def opened(multi_modal: Mapping[str, list]) -> dict[str, list]:
    """What a prompt has, as an engine takes it."""
    return {medium: [item.open() for item in items] for medium, items in multi_modal.items()}


def with_parts(messages: list[dict[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """Chat messages whose contents are parts of text and images, as the templates of processors want them.

    An image stands at each mark in the texts; where there is none, all of them come first in the first message of the user.
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
        raise ValueError(f"the content of a chat message is text, or a list of parts with a type, not {content!r:.80}")
    texts = content.split(MARK)
    parts = [part for text in texts for part in ({"type": "text", "text": text}, {"type": "image"})][:-1]
    return [part for part in parts if part != {"type": "text", "text": ""}]


def _of_bytes(file: BytesIO | Path) -> Image.Image:
    """ValueError where a level of brightness is more than a byte: in RGB nearly all of them would be white."""
    image = Image.open(file)
    if image.mode[0] in "IF":
        raise ValueError(f"its pixels are of mode {image.mode}, and not of 8 bits; scale them")
    return image


def _regular(file: Path) -> Path:
    """ValueError for a pipe or a device, which may never end."""
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
    raise ValueError(f"an image is a path, or an image of the datasets package, not {item!r:.80}")
