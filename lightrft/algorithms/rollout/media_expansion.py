"""Expand prompts with images, videos and sound for the model that learns."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
import torch
from loguru import logger
from PIL import Image

from lightrft.algorithms.rollout.tower_work import TowerWork
from lightrft.config.errors import ConfigError
from lightrft.config.sections import ModelSection
from lightrft.config.tables import table
from lightrft.core.engine import Request
from lightrft.core.samples import Expanded, Prompt
from lightrft.data.media_files import AUDIOS, IMAGES, PART_TYPES, VIDEOS, media_of
from lightrft.engine.media import Clip, MediaReader, Video
from lightrft.engine.model_info import placeholders
from lightrft.models.qwen_omni import load_config

MEDIA_FAMILIES: Mapping[str, Collection[str]] = table("models/families")["media"]
"""Model type -> media whose gradients and token counts were compared with transformers."""
UNTRAINED: Mapping[str, str] = table("models/families")["untrained"]
"""Model type -> why it does not learn from some of its media."""
UNCOUNTED = ("smolvlm",)
"""Families whose processors cannot tell how many tokens an image has; one image of each size is
processed to find out."""
PROBES = ((28, 28), (1000, 300), (300, 1000))
"""Sizes of the images that test whether a processor counts tokens correctly."""
BLANK = Image.new("RGB", (28, 28), "white")  # some models treat black as padding
SAMPLES_PER_SECOND = 16_000
"""Samples per second. Micro-batches without sound get a fifth of a second of noise."""


class Expander:
    """Replaces each placeholder with the tokens of an item, and adds the tensors for the model."""

    def __init__(
        self,
        section: ModelSection,
        media: Collection[str] = (IMAGES,),
        *,
        most: Mapping[str, int] | None = None,
    ):
        """Load the processor.

        `media` are the media of the data. `most` is the largest number of each that the engine
        takes in a prompt.
        """
        trust = {"trust_remote_code": section.trust_remote_code}
        self.media = tuple(media)
        self.most = most
        self.frozen_towers = section.freeze_vision_tower
        self.config = load_config(section.pretrain, **trust)
        self.reader = MediaReader(
            section.pretrain, placeholders(self.config), media_alone=True, **trust
        )
        self.tokens = {medium: self.reader.placeholders[PART_TYPES[medium]] for medium in media}
        self._lengths: dict[tuple[str, tuple[int, ...]], int] = {}
        self._prepared: dict[int, tuple[Prompt, Expanded]] = {}
        """id() of a prompt -> the prompt, kept alive so that the id stays unique, and expansion."""

    def check_family(self) -> None:
        """Raise ConfigError if this type of model was not verified to learn from the media."""
        learned = MEDIA_FAMILIES.get(self.config.model_type, ())
        for medium in self.media:
            if medium not in learned:
                kind = self.config.model_type
                others = ", ".join(
                    name for name, media in MEDIA_FAMILIES.items() if medium in media
                )
                reason = UNTRAINED.get(kind, "its gradients were not compared with transformers'")
                raise ConfigError(
                    f"--{medium}_key: models of type {kind} cannot be trained on {medium}:"
                    f" {reason}. Use a model of type {others}, or omit the flag to train on text"
                )

    def check_same(self, section: ModelSection, flag: str, name: str) -> None:
        """Raise ConfigError if the processor of the model given by `flag` reads media otherwise.

        All models see the same flat rows, so tokens and features must agree.
        """
        other = Expander(replace(section, pretrain=name), self.media)
        try:
            pairs = [*zip(self.blank, other.blank, strict=True), (self._probe, other._probe)]
        except ValueError as error:
            raise ConfigError(
                f"--{flag} {name}: {error}; it must read {' and '.join(self.media)} as --pretrain"
                " does"
            ) from error

        for expanded, reference in pairs:
            names = expanded.features.keys()
            same = (
                expanded.token_ids == reference.token_ids
                and names == reference.features.keys()
                and all(
                    torch.equal(expanded.features[name], reference.features[name]) for name in names
                )
            )
            if not same:
                raise ConfigError(
                    f"--{flag} {name}: its processor reads {' or '.join(self.media)} otherwise than"
                    f" that of --pretrain {section.pretrain}; use a model that was trained from it"
                )

    @property
    def _probe(self) -> Expanded:
        """Expand an item that is larger than a blank one."""
        medium = self.media[0]
        item = {
            IMAGES: BLANK.resize(PROBES[1]),
            AUDIOS: _noise(SAMPLES_PER_SECOND // 2),
            VIDEOS: Video(np.zeros((4, *PROBES[1], 3), dtype=np.uint8)),
        }[medium]
        return self._expanded(medium, item)

    def _expanded(self, medium: str, item: Any) -> Expanded:
        """Expand a prompt that is nothing but this item."""
        return self.reader.expand(Request([min(self.tokens[medium])], {medium: [item]}))

    def __call__(self, prompt: Prompt) -> Expanded:
        if not prompt.multi_modal:
            return Expanded(list(prompt.token_ids), {})
        if id(prompt) in self._prepared:
            return self._prepared[id(prompt)][1]
        expanded = self.reader.expand(Request(list(prompt.token_ids), media_of(prompt)))
        return replace(expanded, tower_tokens=self._tower_work(expanded.features))

    def prepare(self, prompts: Iterable[Prompt]) -> None:
        """Expand prompts before they are asked for, and forget those of the last call.

        Another thread may call it.
        """
        prepared = {id(prompt): (prompt, self(prompt)) for prompt in prompts if prompt.multi_modal}
        self._prepared = prepared

    @cached_property
    def _tower_work(self) -> TowerWork:
        return TowerWork(self.config, self.media, frozen=self.frozen_towers)

    @property
    def chat_template(self) -> str | None:
        return self.reader.processor.chat_template

    @cached_property
    def blank(self) -> tuple[Expanded, ...]:
        """Expand a small item of each medium."""
        items = {
            IMAGES: BLANK,
            VIDEOS: Video(np.full((2, 28, 28, 3), 255, dtype=np.uint8)),
            AUDIOS: _noise(SAMPLES_PER_SECOND // 5),
        }
        return tuple(self._expanded(medium, items[medium]) for medium in self.media)

    def measure(self, prompt: Prompt) -> int:
        """Return how many tokens the expansion adds to the prompt.

        Raises ValueError if items and placeholders differ in number, or if there are more items
        than the limit.
        """
        added = 0
        for medium in self.media:
            items = prompt.multi_modal.get(medium, [])
            tokens = self.tokens[medium]
            if len(items) != (count := sum(token in tokens for token in prompt.token_ids)):
                raise ValueError(
                    f"the prompt has {len(items)} {medium} (--{medium}_key) and {count}"
                    f" placeholders for {medium}"
                )
            if self.most is not None and len(items) > self.most[medium]:
                flag = f"--limit_mm_{PART_TYPES[medium]}_per_prompt {self.most[medium]}"
                raise ValueError(f"the prompt has {len(items)} {medium}, more than {flag}")
            added += sum(self._length(medium, item.size) - 1 for item in items)

        return added - self._num_joined(prompt) if prompt.multi_modal else added

    def _num_joined(self, prompt: Prompt) -> int:
        """Count the tokens that are lost when line breaks of text and media become one token."""
        texts = {
            token: repeat([expanded.token_ids[0], token, expanded.token_ids[-1]])
            for medium, expanded in zip(self.media, self.blank, strict=True)
            for token in self.tokens[medium]
        }
        num_spliced = len(prompt.token_ids) + 2 * sum(token in texts for token in prompt.token_ids)
        return num_spliced - len(self.reader.splice(prompt.token_ids, texts))

    def _length(self, medium: str, size: tuple[int, ...]) -> int:
        """Return how many tokens an item of this size has; they do not depend on what it shows."""
        if (medium, size) not in self._lengths:
            frame = self._frame if medium == IMAGES else None
            if frame is None:
                self._lengths[medium, size] = self._expanded_length(medium, size)
            else:
                self._lengths[medium, size] = self._counted(size) + frame
        return self._lengths[medium, size]

    @cached_property
    def _frame(self) -> int | None:
        """Return how many tokens around an image the processor leaves out of the count.

        Gemma 3 has such a frame. None means that the processor miscounts. Counting avoids
        processing each image; that takes up to half a second.
        """
        if self.config.model_type not in MEDIA_FAMILIES or self.config.model_type in UNCOUNTED:
            return None

        lengths = {
            size: (self._counted(size), self._expanded_length(IMAGES, size)) for size in PROBES
        }
        frames = {expanded - counted for counted, expanded in lengths.values()}
        if len(frames) == 1:
            return frames.pop()

        # No constant frame explains the counts, so the processor's own count is of no use.
        for (width, height), (counted, expanded) in lengths.items():
            logger.warning(
                f"{self.reader.model_path}: the processor gives {counted} tokens for an image of"
                f" {width} x {height} and produces {expanded}; so one image of every size is"
                " processed, which takes longer"
            )

        return None

    def _counted(self, size: tuple[int, ...]) -> int:
        counts = self.reader.processor._get_num_multimodal_tokens(image_sizes=[size[::-1]])
        return counts["num_image_tokens"][0]

    def _expanded_length(self, medium: str, size: tuple[int, ...]) -> int:
        if medium == IMAGES:
            item: Any = BLANK.resize((size[0], size[1]))
        elif medium == VIDEOS:
            item = Video(np.zeros((*size, 3), dtype=np.uint8))
        else:
            item = Clip(_noise(size[0]).waveform, size[1])

        return len(self._expanded(medium, item).token_ids)


def _noise(count: int) -> Clip:
    """Return `count` samples of quiet noise, the same in all processes."""
    waveform = np.random.default_rng(0).normal(0, 0.01, count).astype(np.float32)
    return Clip(waveform, SAMPLES_PER_SECOND)
