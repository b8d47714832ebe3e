"""Images, videos and sound in the data.

The files of a row are named when it is loaded. Contents are read only when needed.
"""

import asyncio
import base64
import json
import os
import re
import stat
import struct
import tempfile
import wave
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from io import BytesIO
from ipaddress import ip_address
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image, ImageOps, ImageSequence

from lightrft.config.errors import DataError
from lightrft.core.samples import Prompt

IMAGES = "images"
VIDEOS = "videos"
AUDIOS = "audios"
"""Keys of the media in prompts and requests."""
PART_TYPES = {IMAGES: "image", VIDEOS: "video", AUDIOS: "audio"}
"""Key of a medium -> the type in the parts of a chat message.

<image>, <video> and <audio> stand for them in a message's text.
"""
ORIENTATION = 0x0112
"""EXIF tag of the orientation of an image; values from 5 on include a rotation by 90 degrees."""
THUMBNAIL = 160
"""Longer side of a thumbnail in pixels: a JPEG of about 5 kB, never more than about 30 kB."""
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    struct.error,
    wave.Error,
    Image.DecompressionBombError,
)
"""Exceptions for damaged files, and for files with too many pixels."""
PLAYER_RATE = 8000
PLAYER_SAMPLES = 64_000
"""Samples per second, and number of samples of one byte, of the sound that a report plays."""
FIRST_ROWS = 64
"""Number of rows whose media --check_media first reads."""
ROWS_AHEAD = 1024
"""Number of rows whose media are read ahead by --check_media all."""
FETCH_SECONDS = 300.0
SILENT_SECONDS = 30.0
"""Longest time until a file has been fetched, and without a byte of it."""
MOST_REDIRECTS = 10
RIFF = b"RIFF"
"""First bytes of a .wav file."""
WAVE_TYPES = {1: np.uint8, 2: np.int16, 4: np.int32}
"""Bytes of a sample -> the type."""
SOURCE_KEYS = "path url image video audio image_url video_url audio_url input_audio data".split()
"""Keys of an object that names a file."""
MIN_BASE64 = 256
"""A text without a head that is shorter than this is not taken for base64."""
BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
SCHEME_OF_ITEM = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
MAX_PATH = 4096
"""Number of characters of the longest path of Linux."""
STILL = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
"""Suffixes of images in a list that is one video."""


@contextmanager
def _readable(what: str, problem: type[ValueError] = ValueError) -> Iterator[None]:
    """Raise the problem, with what cannot be read, for a damaged file that is read inside."""
    try:
        yield
    except UNREADABLE as error:
        advice = "; repair it, or remove its rows from the data" if problem is DataError else ""
        raise problem(f"{what} cannot be read: {error}{advice}") from error


@dataclass(frozen=True, slots=True)
class ImageFile:
    """Image file that is read each time it is needed."""

    name: str
    """Name of the image in the data."""
    source: Path | bytes
    """Path of the file, or the contents."""

    @property
    def size(self) -> tuple[int, int]:
        """Return width and height, upright.

        Only the start of the file is read. Raise ValueError if it cannot be read.
        """
        with _readable(f"image {self.name}"):
            inside = isinstance(self.source, bytes)
            with _of_bytes(BytesIO(self.source) if inside else _regular(self.source)) as image:
                # PNG's own getexif would decode the whole image
                turned = Image.Image.getexif(image).get(ORIENTATION, 1) >= 5
                return image.size[::-1] if turned else image.size

    def open(self) -> Image.Image:
        """Return the image in RGB, without transparency, and upright.

        Raise DataError if it cannot be read.
        """
        with _readable(f"image {self.name}", DataError):
            image = _of_bytes(BytesIO(_content(self.source)))
            return ImageOps.exif_transpose(image).convert("RGB")

    @property
    def identity(self) -> bytes:
        """Return the path or the content; it distinguishes the image from others."""
        return _identity(self.source)

    def thumbnail(self) -> str:
        """Return a small JPEG of the image as a data URI.

        A page shows it without loading anything.
        """
        return _small_jpeg(self.open())


@dataclass(frozen=True, slots=True)
class VideoFile:
    """Video of evenly spaced frames: a file, contents, or the images of the frames."""

    name: str
    source: Path | bytes | tuple[ImageFile, ...]
    fps: float = 2.0
    """Frames per second that the model sees. Frames without times count as this many per second."""
    most: int = 64
    """Largest number of frames that the model sees."""

    @property
    def size(self) -> tuple[int, int, int]:
        """Return number, height and width of the frames that the model sees.

        Raise ValueError if it cannot be read.
        """
        with _readable(f"video {self.name}"), closing(self._read()) as frames:
            total, seconds = next(frames)
            first = next(frames)
            return len(self._frame_indices(total, seconds)), first.height, first.width

    def open(self) -> dict[str, Any]:
        """Return `frames` [T, H, W, 3] uint8 and `fps`.

        Raise DataError if it cannot be read.
        """
        with _readable(f"video {self.name}", DataError):
            with closing(self._read()) as frames:
                total, seconds = next(frames)
                wanted = self._frame_indices(total, seconds)
                frame_of = {index: frame for index, frame in enumerate(frames) if index in wanted}
            last = max(frame_of)  # a header may promise more frames than there are
            rows = [np.asarray(frame_of[min(index, last)].convert("RGB")) for index in wanted]
            return {"frames": np.stack(rows), "fps": len(rows) / seconds if seconds else self.fps}

    @property
    def identity(self) -> bytes:
        if isinstance(self.source, tuple):
            return b"".join(frame.identity for frame in self.source)
        return _identity(self.source)

    def thumbnail(self) -> str:
        """Return the middle frame as a small JPEG."""
        frames = self.open()["frames"]
        return _small_jpeg(Image.fromarray(frames[len(frames) // 2]))

    def _frame_indices(self, total: int, seconds: float) -> list[int]:
        """Return the indices of the frames that the model sees, of `total` in so many seconds.

        0 seconds mean that the times are not known.
        """
        count = min(max(round(seconds * self.fps), 1) if seconds else total, self.most, total)
        return [(2 * index + 1) * total // (2 * count) for index in range(count)]

    def _read(self) -> Iterator[Any]:
        """Yield (number of frames, length in seconds or 0), then the frames as images."""
        if isinstance(self.source, tuple):
            yield len(self.source), 0.0
            yield from (image.open() for image in self.source)
            return

        content = _content(self.source)
        try:
            image = Image.open(BytesIO(content))
        except UNREADABLE:
            yield from decoded_frames(content)
            return

        with image:
            seconds = (
                sum(frame.info.get("duration", 0) for frame in ImageSequence.Iterator(image)) / 1000
            )
            yield image.n_frames, seconds
            yield from (frame.copy() for frame in ImageSequence.Iterator(image))


@dataclass(frozen=True, slots=True)
class AudioFile:
    """Clip of sound: a file, contents, or a waveform.

    A waveform is [N] floats with the number of samples per second.
    """

    name: str
    source: Path | bytes | tuple[Sequence[float], int]
    rate: int = 0
    """Samples per second to convert clips to; 0: they are not converted."""

    @property
    def size(self) -> tuple[int, int]:
        """Return the number of samples, and how many there are in a second.

        Raise ValueError if it cannot be read.
        """
        with _readable(f"sound {self.name}"):
            count, rate = self._stored_size()
            if self.rate:
                return (resampled_length(count, rate, self.rate), self.rate)
            return (count, rate)

    def _stored_size(self) -> tuple[int, int]:
        if isinstance(self.source, tuple):
            return len(self.source[0]), self.source[1]
        if (content := _content(self.source))[:4] == RIFF:
            with wave.open(BytesIO(content)) as file:
                return file.getnframes(), file.getframerate()
        clip = decoded_sound(content)
        return len(clip["array"]), clip["sampling_rate"]

    def open(self) -> dict[str, Any]:
        """Return `array` [N] float32 from -1 to 1, the mean of the channels, and `sampling_rate`.

        Raise DataError if it cannot be read.
        """
        with _readable(f"sound {self.name}", DataError):
            clip = self._stored()
            changes = self.rate not in (0, clip["sampling_rate"])
            return resample(clip, self.rate) if changes else clip

    def _stored(self) -> dict[str, Any]:
        if isinstance(self.source, tuple):
            return {
                "array": np.asarray(self.source[0], dtype=np.float32),
                "sampling_rate": self.source[1],
            }
        content = _content(self.source)
        return read_wave(content) if content[:4] == RIFF else decoded_sound(content)

    @property
    def identity(self) -> bytes:
        if isinstance(self.source, tuple):
            return np.asarray(self.source[0]).tobytes()
        return _identity(self.source)

    def player(self) -> str:
        """Return the first seconds as a small .wav file in a data URI.

        A page plays it without loading anything.
        """
        clip = self.open()
        content = BytesIO()
        every = max(1, round(clip["sampling_rate"] / PLAYER_RATE))
        whole = clip["array"][: len(clip["array"]) // every * every]
        array = whole.reshape(-1, every).mean(1)[:PLAYER_SAMPLES]
        with wave.open(content, "wb") as file:
            file.setparams((1, 1, clip["sampling_rate"] // every, 0, "NONE", ""))
            file.writeframes(((array.clip(-1, 1) + 1) * 127.5).astype(np.uint8).tobytes())
        return f"data:audio/wav;base64,{base64.b64encode(content.getvalue()).decode()}"


MediaFile = ImageFile | VideoFile | AudioFile


# -- media of a row


def items_of(medium: str, value: Any) -> list[Any]:
    """Return the items of a column with one or several; a list of images is one video."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with suppress(ValueError):
            value = json.loads(value)

    if value is None:
        return []
    if not isinstance(value, list | tuple):
        return [value]

    if medium != VIDEOS and any(isinstance(item, list | tuple) for item in value):
        value = [
            inner
            for item in value
            for inner in (item if isinstance(item, list | tuple) else [item])
        ]

    first = value[0] if medium == VIDEOS and value else None
    frames = first is not None and not isinstance(first, list | tuple) and _is_image(first)
    return [value] if frames else list(value)


def items_in(medium: str, messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the items that parts of messages have themselves.

    An example is {"type": "image", "image": path}.
    """
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    parts = [part for content in contents for part in content if part["type"] == PART_TYPES[medium]]
    return [item for part in parts if (item := named(part)) is not part]


def _is_image(item: Any) -> bool:
    if isinstance(item, Image.Image | np.ndarray):
        return isinstance(item, Image.Image) or item.ndim < 4
    name = named(item)
    return isinstance(name, str) and Path(name).suffix.lower() in STILL


def named(item: Any) -> Any:
    """Return the path, address or content of an item.

    It may be an object with one of the usual keys; otherwise the item itself is returned.
    """
    if not isinstance(item, dict) or item.get("bytes"):
        return item["bytes"] if isinstance(item, dict) and isinstance(item["bytes"], str) else item
    return next((named(item[key]) for key in SOURCE_KEYS if item.get(key) is not None), item)


def decoded(text: str) -> bytes | None:
    """Return the content of a data URI, or of base64 without a head; None for other texts."""
    head, _, content = text.partition(";base64,") if text[:5].lower() == "data:" else ("", "", text)
    if not head and (len(text) < MIN_BASE64 or not BASE64.fullmatch(text)):
        return None
    try:
        return base64.b64decode(content, validate=True)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class MediaLocation:
    """Location of the files of a data set."""

    folder: Path
    """Folder that paths are relative to."""
    root: Path | None = None
    """Folder that they are relative to instead; no file may be outside of it."""
    most_bytes: int = 1 << 30
    """Size of the largest file that is read."""
    urls: bool = False
    """True if files may have an address of HTTP."""

    def image(self, item: Any) -> ImageFile:
        if isinstance(item, Image.Image | np.ndarray):
            item = _png(item)
        return ImageFile(*self._file(item, "image"))

    def video(self, item: Any, *, fps: float, most: int) -> VideoFile:
        if isinstance(item, np.ndarray) and item.ndim == 4:
            item = list(item)
        if isinstance(item, list | tuple):
            frames = tuple(map(self.image, item))
            return VideoFile(f"{frames[0].name} and {len(frames) - 1} others", frames, fps, most)
        return VideoFile(*self._file(item, "video"), fps, most)

    def audio(self, item: Any, *, rate: int = 0) -> AudioFile:
        if isinstance(item, dict) and item.get("array") is not None:
            return AudioFile(
                item.get("path") or "inside the data",
                (item["array"], int(item["sampling_rate"])),
                rate,
            )
        return AudioFile(*self._file(item, "sound"), rate)

    def _file(self, item: Any, label: str) -> tuple[str, Path | bytes]:
        """Return the name and the source of a file.

        Raise ValueError for a path outside of the root, a file that is too large, and other values.
        """
        name, source = self._resolve(item, label)
        if isinstance(source, bytes):
            size = len(source)
        else:
            size = source.stat().st_size if source.is_file() else 0
        if size > self.most_bytes:
            raise ValueError(
                f"{label} {name} has {size / 1e6:,.6g} MB, more than --media_max_mb"
                f" {self.most_bytes / 1e6:,.6g}"
            )

        return name, source

    def _resolve(self, item: Any, label: str) -> tuple[str, Path | bytes]:
        item = named(item)
        # Base64 is often broken into lines.
        if isinstance(item, str) and (content := decoded("".join(item.split()))):
            return "inside the data", content

        if isinstance(item, str) and (head := SCHEME_OF_ITEM.match(item)):
            scheme = head[1].lower()
            if scheme not in ("file", "http", "https"):
                raise ValueError(
                    f"{label} {item}: {scheme}:// is not read; give a path or an address of http"
                )
            if scheme != "file" and not self.urls:
                raise ValueError(f"{label} {item} is an address: --media_urls allows to fetch it")
            if scheme != "file":
                return item, fetch(scheme + item[head.end(1) :], self.most_bytes)
            item = unquote(urlsplit(item, allow_fragments=False).path)
        if isinstance(item, str) and 0 < len(item) <= MAX_PATH and item[:5].lower() != "data:":
            path = (self.root or self.folder) / Path(item).expanduser()
            if self.root is not None and not path.resolve().is_relative_to(self.root.resolve()):
                raise ValueError(f"{label} {item} is not in --media_root {self.root}")
            return item, path
        if isinstance(item, bytes) and item:
            return "inside the data", item

        if isinstance(item, dict) and (content := item.get("bytes")):
            return item.get("path") or "inside the data", content

        raise ValueError(
            f"{label}: it must be a path, an address, bytes of a file, base64, or what the datasets"
            f" package yields, not {item!r:.80}"
        )


def _png(pixels: Image.Image | np.ndarray) -> bytes:
    """Return an image, or pixels [H, W] or [H, W, 3] uint8, as a file with the same pixels.

    Raise ValueError for other arrays.
    """
    if isinstance(pixels, np.ndarray):
        if pixels.dtype != np.uint8 or not (
            pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)
        ):
            raise ValueError(
                f"image: an array must be [H, W] or [H, W, 3] of uint8, not {list(pixels.shape)} of"
                f" {pixels.dtype}"
            )
        pixels = Image.fromarray(pixels)

    content = BytesIO()
    # PNG has no CMYK. Weak compression is fast and keeps the pixels as well.
    storable = pixels.convert("RGB") if pixels.mode == "CMYK" else pixels
    storable.save(content, "PNG", compress_level=1)
    return content.getvalue()


def fetch(address: str, most_bytes: int) -> Path:
    """Return a file with the content of an address; all processes of this host fetch it once.

    Raise ValueError if it cannot be fetched, and for content of more than `most_bytes`.
    """
    folder = Path(tempfile.gettempdir()) / f"lightrft-media-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Other users of the host could put their own files into a folder of this name.
    owner = folder.lstat()
    if not stat.S_ISDIR(owner.st_mode) or owner.st_uid != os.getuid() or owner.st_mode & 0o022:
        raise ValueError(
            f"{folder} is a folder that others can write, or a link: remove it, or set TMPDIR to a"
            " folder of your own"
        )

    file = folder / sha256(address.encode(errors="surrogatepass")).hexdigest()
    if not file.exists():
        with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in its own
            content = thread.submit(asyncio.run, _fetched(address, most_bytes)).result()
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(content)
        temporary.rename(file)

    return file


async def _fetched(address: str, most_bytes: int) -> bytes:
    """Return the content of an address, or raise ValueError as fetch() does."""
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise ValueError(f"--media_urls needs {error.name}: pip install httpx") from error

    content = bytearray()
    try:
        url = httpx.URL(address)
        async with asyncio.timeout(FETCH_SECONDS), httpx.AsyncClient(timeout=SILENT_SECONDS) as web:
            for _ in range(MOST_REDIRECTS):
                async with web.stream("GET", url) as response:
                    if response.next_request is None:
                        kind = response.headers.get("content-type", "")
                        if response.status_code != 200 or kind.startswith("text/html"):
                            raise ValueError(f"the answer is {response.status_code} {kind}")
                        async for chunk in response.aiter_bytes():
                            content += chunk
                            if len(content) > most_bytes:
                                most = f"{most_bytes / 1e6:,.6g}"
                                raise ValueError(f"it has more than --media_max_mb {most}")
                        return bytes(content)

                    origin = url.host
                    url = response.next_request.url
                    if url.host != origin:
                        await _check_public(url.host)
            raise ValueError(f"it leads on more than {MOST_REDIRECTS} times")
    except TimeoutError as error:
        raise ValueError(f"{address} cannot be fetched in {FETCH_SECONDS:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ExceptionGroup) as error:
        what = repr(error) if isinstance(error, ExceptionGroup) or not str(error) else error
        raise ValueError(f"{address} cannot be fetched: {what}") from error


async def _check_public(host: str) -> None:
    """Raise ValueError for a host of this machine or its network: no server may send us there."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None)
    addresses = {address[0].partition("%")[0] for *_, address in found}
    if not all(ip_address(address).is_global for address in addresses):
        raise ValueError(f"it leads to {host}, which is no public address")


def open_media(multi_modal: Mapping[str, list[MediaFile]]) -> dict[str, list]:
    """Open all media of a prompt, in the form that an engine takes."""
    return {medium: [item.open() for item in items] for medium, items in multi_modal.items()}


def media_of(prompt: Prompt) -> dict[str, list]:
    """Open all media of a prompt.

    Raise DataError with the location of the row if one cannot be read any more.
    """
    try:
        return open_media(prompt.multi_modal)
    except DataError as error:
        raise DataError(f"{prompt.location}: {error}" if prompt.location else str(error)) from error


def media_checked(
    rows: Iterable[tuple[str, Prompt]], mode: str
) -> Iterator[tuple[str, Prompt, str]]:
    """Yield the rows with the reason why one of the media cannot be read; see --check_media.

    The reason is empty if all can be read.
    """
    rows = iter(rows)
    count = 0
    if mode == "first":
        for where, prompt in rows:
            yield where, prompt, unreadable(prompt)
            count += bool(prompt.multi_modal)
            if count == FIRST_ROWS:
                break
    elif mode == "all":
        yield from _checked_by_processes(rows)

    yield from ((where, prompt, "") for where, prompt in rows)


def unreadable(prompt: Prompt) -> str:
    """Return the reason why one of the media of a prompt cannot be read; empty if all can."""
    try:
        open_media(prompt.multi_modal)
    except DataError as error:
        return str(error)
    return ""


def _checked_by_processes(rows: Iterator[tuple[str, Prompt]]) -> Iterator[tuple[str, Prompt, str]]:
    processes = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        while window := list(islice(rows, ROWS_AHEAD)):
            media = [replace(prompt, text="", token_ids=(), columns={}) for _, prompt in window]
            some = any(each.multi_modal for each in media)
            problems = pool.map(unreadable, media, chunksize=16) if some else [""] * len(window)
            yield from (
                (where, prompt, problem)
                for (where, prompt), problem in zip(window, problems, strict=True)
            )


# -- media in chat messages


def with_parts(messages: list[dict[str, Any]], counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return chat messages with contents that are parts, as the templates of processors require.

    `counts` has the number of items of each medium that rows may have. An item replaces each mark
    of the same kind in the texts; items of a kind without marks precede the text of the first user
    message. Raise ValueError for content of another type.
    """
    kinds = [PART_TYPES[medium] for medium in counts]
    messages = [
        message | {"content": _parts(message.get("content"), kinds)} for message in messages
    ]

    marked = {part.get("type") for message in messages for part in message["content"]}
    first = next((message for message in messages if message.get("role") == "user"), None)
    if first is not None:
        unmarked = [
            {"type": PART_TYPES[medium]}
            for medium, count in counts.items()
            if PART_TYPES[medium] not in marked
            for _ in range(count)
        ]
        first["content"] = unmarked + first["content"]

    return messages


def _parts(content: Any, kinds: list[str]) -> list[dict[str, Any]]:
    if content is None or (
        isinstance(content, list) and all(isinstance(part, dict) for part in content)
    ):
        return [
            {"type": part["type"]} if part.get("type") in kinds else part for part in content or ()
        ]

    if not isinstance(content, str):
        raise ValueError(
            "the content of a chat message must be text, or a list of parts with a type, not"
            f" {content!r:.80}"
        )

    pieces = re.split(f"<({'|'.join(kinds)})>", content)  # texts and, between them, kinds
    return [
        {"type": "text", "text": piece} if index % 2 == 0 else {"type": piece}
        for index, piece in enumerate(pieces)
        if piece
    ]


# -- decoding


def _identity(source: Path | bytes) -> bytes:
    return source if isinstance(source, bytes) else os.fsencode(source)


def _content(source: Path | bytes) -> bytes:
    return source if isinstance(source, bytes) else _regular(source).read_bytes()


def _of_bytes(file: BytesIO | Path) -> Image.Image:
    """Open an image.

    Raise ValueError for more than 8 bits per channel: in RGB, nearly all pixels would be white.
    """
    image = Image.open(file)
    if image.mode[0] in "IF":
        raise ValueError(f"its pixels have mode {image.mode}, not 8 bits; scale them")
    return image


def _regular(file: Path) -> Path:
    """Return the file. Raise ValueError for a pipe or a device, which may never end."""
    if file.exists() and not file.is_file():
        raise ValueError("not a regular file")
    return file


def _small_jpeg(image: Image.Image) -> str:
    file = BytesIO()
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    image.save(file, "JPEG", quality=75)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def read_wave(content: bytes) -> dict[str, Any]:
    """Return the sound of a .wav file, as the mean of the channels: [N] float32, -1 to 1."""
    with wave.open(BytesIO(content)) as file:
        kind = WAVE_TYPES.get(file.getsampwidth())
        channels = file.getnchannels()
        if kind is None:
            raise ValueError(
                f"its samples have {file.getsampwidth()} bytes, and only"
                f" {', '.join(map(str, WAVE_TYPES))} are read"
            )
        samples = np.frombuffer(file.readframes(file.getnframes()), kind).astype(np.float32)
        rate = file.getframerate()

    # One byte is unsigned in .wav files, with silence in the middle; larger samples are signed.
    half = 2.0 ** (8 * np.dtype(kind).itemsize - 1)
    array = ((samples - half * (kind is np.uint8)) / half).reshape(-1, channels).mean(1)
    if not len(array):
        raise ValueError("it has no samples")

    return {"array": array, "sampling_rate": rate}


def decoded_frames(content: bytes) -> Iterator[Any]:
    """Yield (number of frames, seconds) of a video, then the frames as images.

    Raise ValueError for a file that is none.
    """
    av = _av()
    try:
        with av.open(BytesIO(content)) as file:
            stream = file.streams.video[0]
            total = stream.frames or sum(packet.size > 0 for packet in file.demux(stream))
            yield total, float(total / stream.average_rate)
            file.seek(0)
            yield from (frame.to_image() for frame in file.decode(stream))
    except (av.FFmpegError, IndexError) as error:
        raise ValueError(f"no video that FFmpeg reads: {error}") from error


def resampled_length(count: int, rate: int, new_rate: int) -> int:
    return max(1, round(count * new_rate / rate))


def resample(clip: Mapping[str, Any], rate: int) -> dict[str, Any]:
    """Return a clip with `rate` samples per second, converted by FFmpeg."""
    av = _av()
    array = np.ascontiguousarray(clip["array"], dtype=np.float32)
    frame = av.AudioFrame.from_ndarray(array[None], format="fltp", layout="mono")
    frame.sample_rate = clip["sampling_rate"]
    resample = av.AudioResampler("fltp", layout="mono", rate=rate)
    waveform = np.concatenate(
        [chunk.to_ndarray()[0] for given in (frame, None) for chunk in resample.resample(given)]
    )
    # FFmpeg may return a few samples more or less than `size` has announced.
    count = resampled_length(len(array), clip["sampling_rate"], rate)

    return {
        "array": np.pad(waveform, (0, max(0, count - len(waveform))))[:count],
        "sampling_rate": rate,
    }


def decoded_sound(content: bytes) -> dict[str, Any]:
    """Return the mean of the channels of a clip and the sampling rate.

    Raise ValueError for a file that is none.
    """
    av = _av()
    try:
        with av.open(BytesIO(content)) as file:
            stream = file.streams.audio[0]
            resample = av.AudioResampler("fltp", layout="mono", rate=stream.rate)
            frames = [
                chunk.to_ndarray()[0]
                for frame in (*file.decode(stream), None)
                for chunk in resample.resample(frame)
            ]
            return {"array": np.concatenate(frames), "sampling_rate": stream.rate}
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise ValueError(f"no sound that FFmpeg reads: {error}") from error


def _av() -> Any:
    try:
        import av
    except ModuleNotFoundError as error:
        raise ValueError(
            "without FFmpeg only .gif, .webp, .png and .wav are read, and no clip is resampled: pip"
            " install '.[media]'"
        ) from error
    return av
