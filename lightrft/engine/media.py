"""Images, videos and audio in prompts: one form for all engines, and the expansion for models."""

import hashlib
import wave
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from numbers import Real
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, ProcessorMixin

from lightrft.core.engine import MEDIA_NAMES, Request
from lightrft.core.samples import Expanded
from lightrft.data.media_files import read_wave

FRAMES_ALONE = ("Qwen2_5OmniProcessor",)
"""Processors of models that compute only the frames that a clip has. Clips are padded to the
longest of them. Padding to the 300 s that such a model accepts would take a hundred times as long.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """A video; the model gets all frames, without sampling."""

    frames: np.ndarray
    """[T, H, W, 3] uint8, RGB."""
    fps: float = 2.0
    """Frames per second."""

    @classmethod
    def of(cls, value: Any) -> Self:
        """Build a video from a Video, {"frames", "fps"}, or frames.

        Frames are an array, or a list of PIL images of equal size.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping) and value.keys() >= {"frames", "fps"}:
            return replace(cls.of(value["frames"]), fps=float(value["fps"]))

        if (
            isinstance(value, list | tuple)
            and value
            and all(isinstance(frame, Image.Image) for frame in value)
        ):
            value = np.stack([np.asarray(frame.convert("RGB")) for frame in value])

        if not isinstance(value, np.ndarray):
            raise ValueError(
                f"a {type(value).__name__} is not a video: pass frames as an array or as PIL"
                " images, or a Video"
            )
        if value.dtype != np.uint8 or value.ndim != 4 or value.shape[-1] != 3 or not len(value):
            raise ValueError(
                f"frames must be [T, H, W, 3] of uint8, and these are {list(value.shape)} of"
                f" {value.dtype}"
            )

        return cls(value)


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """An audio clip with a single channel."""

    waveform: np.ndarray
    """[N] float32, -1 to 1."""
    sampling_rate: int
    """Samples per second."""

    @classmethod
    def of(cls, value: Any) -> Self:
        """Build a clip from a Clip, a .wav file's path, (waveform, sampling rate), or a mapping.

        The mapping is `datasets`' {"array", "sampling_rate"}.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str | Path):
            try:
                value = read_wave(Path(value).read_bytes())
            except (wave.Error, EOFError, ValueError) as error:
                raise ValueError(f"{value} is not a .wav file of integers: {error}") from error

        if isinstance(value, Mapping) and value.keys() >= {"array", "sampling_rate"}:
            value = value["array"], value["sampling_rate"]
        if not is_clip(value):
            raise ValueError(
                f"a {type(value).__name__} is not an audio clip: pass (waveform, sampling rate), a"
                " mapping with array and sampling_rate, the path of a .wav file, or a Clip"
            )

        waveform = np.asarray(value[0])
        if waveform.dtype.kind != "f" or waveform.ndim != 1 or not len(waveform):
            raise ValueError(
                f"a waveform must be [N] of floats, and this one is {list(waveform.shape)} of"
                f" {waveform.dtype}"
            )

        return cls(waveform.astype(np.float32), int(value[1]))


def is_clip(value: Any) -> bool:
    """Return True for (waveform, sampling rate), False for a pair of clips."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Real)


def _image(value: Any) -> Image.Image:
    """Convert to RGB and drop transparency, as transformers does.

    vLLM would render transparent pixels on white.
    """
    if not isinstance(value, Image.Image):
        raise ValueError(f"a {type(value).__name__} is not an image: pass PIL images")
    return value.convert("RGB")


COMMON_FORMS: dict[str, Callable[[Any], Any]] = {
    "images": _image,
    "videos": Video.of,
    "audios": Clip.of,
}
"""Functions that turn what users pass into the common form, by medium."""


def read(multi_modal: Mapping[str, Iterable[Any]]) -> dict[str, list]:
    """Convert media to the common form; raises ValueError for items that cannot be read."""
    media: dict[str, list] = {}
    for name, items in multi_modal.items():
        try:
            media[name] = [COMMON_FORMS[name](item) for item in items]
        except (ValueError, OSError) as error:  # PIL reads an image at its first use
            raise ValueError(f"{name}: {error}") from error
    return media


def digest(request: Request) -> str:
    """Return a hash of all pixels and audio samples of a request; empty without media."""
    if not request.multi_modal:
        return ""
    hasher = hashlib.sha256()
    for name, items in sorted(read(request.multi_modal).items()):
        for item in items:
            array, *rest = _array(item)
            hasher.update(repr((name, array.shape, *rest)).encode())
            hasher.update(array.tobytes())
    return hasher.hexdigest()


def _array(item: Image.Image | Video | Clip) -> tuple[np.ndarray, *tuple[float, ...]]:
    if isinstance(item, Clip):
        return item.waveform, item.sampling_rate
    return (item.frames, item.fps) if isinstance(item, Video) else (np.asarray(item),)


@dataclass(eq=False)
class MediaReader:
    """Reads media with the processor of a model's folder, and leaves the prompt's tokens alone.

    The text is not tokenized again, because a second tokenization can give different tokens.
    """

    model_path: str
    placeholders: Mapping[str, frozenset[int]]
    """Placeholders by medium, as in Vocabulary."""
    trust_remote_code: bool = False
    media_alone: bool = False
    """True for an engine that computes token_type_ids itself and drops the processor's."""
    _lock: Any = field(default_factory=Lock)
    """Held while the processor runs: the tokenizer in it fails when two threads call it."""

    @cached_property
    def processor(self) -> ProcessorMixin:
        """Load the processor at first use; raises ValueError if the folder has none."""
        try:
            processor = AutoProcessor.from_pretrained(
                self.model_path, trust_remote_code=self.trust_remote_code
            )
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"{self.model_path} has no processor that transformers can load: {error}"
            ) from error

        if not isinstance(processor, ProcessorMixin):
            raise ValueError(f"{self.model_path} has no processor for images, videos or audio")
        return processor

    def expand(self, request: Request) -> Expanded:
        """Replace each placeholder by the tokens of an item; return prompt and all tensors."""
        texts: dict[int, Iterator[list[int]]] = {}
        features: dict[str, Tensor] = {}
        for name, items in read(request.multi_modal).items():
            if items:
                with self._lock:
                    of_items, tensors = self._processed(name, items)
                texts |= dict.fromkeys(self.placeholders[MEDIA_NAMES[name]], iter(of_items))
                features |= tensors
        return Expanded(self.splice(request.token_ids, texts), features)

    def splice(self, token_ids: list[int], texts: Mapping[int, Iterator[list[int]]]) -> list[int]:
        """Replace each placeholder by the next of the medium's texts, given as tokens.

        The text of a Gemma 3 image has two line breaks at each end. Line breaks of the prompt may
        stand beside them. The tokenizer has tokens for three and four line breaks, and they are
        joined to these in the same order as in vLLM.
        """
        segments: list[list[int]] = [[]]
        for token in token_ids:
            if token in texts:
                segments += [list(next(texts[token])), []]
            else:
                segments[-1].append(token)

        segments = [segment for segment in segments if segment]
        breaks = self._line_breaks
        for first, second in ((1, 2), (2, 1), (2, 2)) if breaks else ():
            for left, right in pairwise(segments):
                if left and right and (left[-1], right[0]) == (breaks[first], breaks[second]):
                    left.pop()
                    right[0] = breaks[first + second]

        return [token for segment in segments for token in segment]

    @cached_property
    def _line_breaks(self) -> dict[int, int]:
        """Return the tokens of one to four line breaks by number; empty without all of them."""
        vocabulary = self.processor.tokenizer.get_vocab()
        texts = {count: "\n" * count for count in range(1, 5)}
        if vocabulary.keys() >= {*texts.values()}:
            return {count: vocabulary[text] for count, text in texts.items()}
        return {}

    def heard(self, clips: list[Clip]) -> list[Clip]:
        """Return the clips; raises ValueError for one that the model would misread or truncate."""
        for clip in clips:
            # Models read a fixed rate, and silently cut what is longer than they accept.
            audio = self.processor.feature_extractor
            longest = getattr(audio, "n_samples", None)
            seconds = len(clip.waveform) / clip.sampling_rate
            if clip.sampling_rate != audio.sampling_rate:
                raise ValueError(
                    f"{clip.sampling_rate} samples per second; the model needs"
                    f" {audio.sampling_rate}: resample it"
                )

            if longest and len(clip.waveform) > longest:
                raise ValueError(
                    f"{seconds:.1f} s, and the model accepts at most"
                    f" {longest / audio.sampling_rate:.0f} s: cut it"
                )

        return clips

    def _processed(self, name: str, items: list) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Return the tokens of each item, and the tensors of all items."""
        token = getattr(self.processor, f"{MEDIA_NAMES[name]}_token")
        output = self.processor(
            text=[token] * len(items),
            add_special_tokens=False,
            padding=True,
            return_tensors="pt",
            **self._arguments(name, items),
        )
        # Each item is processed with only a placeholder as text, so its tokens stand alone.
        ids = output.pop("input_ids")
        real = output.pop("attention_mask").bool()

        others = [name for name in output if name.endswith("token_type_ids")]
        if others and not self.media_alone:
            raise ValueError(
                f"the hf engine does not support the model's {', '.join(others)}; use --engine_type"
                " vllm"
            )

        if name == "audios" and self._frames_alone:
            longest = int(output["feature_attention_mask"].sum(-1).max())
            padded = ("input_features", "feature_attention_mask")
            output |= {name: output[name][..., :longest].clone() for name in padded}

        texts = [row[mask].tolist() for row, mask in zip(ids, real, strict=True)]
        return texts, {
            name: torch.as_tensor(tensor) for name, tensor in output.items() if name not in others
        }

    def _arguments(self, name: str, items: list) -> dict[str, Any]:
        if name == "images":
            return {"images": [[image] for image in items]}

        if name == "videos":
            return {
                "videos": [video.frames for video in items],
                "do_sample_frames": False,
                "video_metadata": [metadata(video) for video in items],
            }

        sound = {
            "audio": [clip.waveform for clip in self.heard(items)],
            "sampling_rate": items[0].sampling_rate,
        }
        if not self._frames_alone:
            return sound

        longest = max(map(len, sound["audio"]))  # its last frame reads beyond it
        silence = self.processor.feature_extractor.n_fft
        return sound | {"audio_kwargs": {"max_length": longest + silence}}

    @property
    def _frames_alone(self) -> bool:
        return type(self.processor).__name__ in FRAMES_ALONE


def metadata(video: Video) -> dict[str, Any]:
    """Return the metadata of a video under the names of transformers and vLLM."""
    count = len(video.frames)
    return {
        "total_num_frames": count,
        "fps": video.fps,
        "frames_indices": list(range(count)),
        "duration": count / video.fps,
    }
