"""What a model's folder tells an engine before there are weights."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from lightrft.config import EngineSection
from lightrft.engine.requests import MEDIA
from lightrft.weight_sync.names import PublishedNames

PLACEHOLDERS = {medium: (f"{medium}_token_id", f"{medium}_token_index") for medium in MEDIA.values()}
"""Where configurations name the token that stands for a part of an image, a video or a sound."""
FRAME = ("vision_start_token_id", "vision_end_token_id")
"""Where they name the tokens that some models want around a placeholder."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model."""

    size: int
    """Of the output layer."""
    end_token_ids: frozenset[int]
    placeholder_token_ids: tuple[int, ...]
    """They stand for media in prompts; a response that has one cannot be read back."""
    model_path: str
    trust_remote_code: bool = False
    placeholders: dict[str, frozenset[int]] = field(default_factory=dict)
    """The same by medium: image, video, audio."""
    frame: tuple[int, int] | None = None
    """Tokens before and behind a placeholder, where the model has such."""

    @classmethod
    def of(cls, model_path: str, config: PretrainedConfig, *, trust_remote_code: bool = False) -> Self:
        ends = end_token_ids(model_path, config)
        frame = tuple(token for name in FRAME if (token := getattr(config, name, None)) is not None)
        return cls(config.get_text_config().vocab_size, ends, placeholder_token_ids(config), model_path, trust_remote_code,
                   placeholders(config), frame if len(frame) == len(FRAME) else None)

    def num_placeholders(self, token_ids: list[int], medium: str) -> int:
        return sum(token in self.placeholders.get(medium, ()) for token in token_ids)

    def without_placeholders(self, token_ids: list[int], medium: str) -> list[int]:
        """The prompt without the tokens that stand for this medium, and without what frames them."""
        gone = self.placeholders.get(medium, frozenset())
        before, behind = self.frame or (None, None)
        around = zip([None, *token_ids], token_ids, [*token_ids[1:], None], strict=False)
        return [token for left, token, right in around
                if not (token in gone or (token == before and right in gone) or (token == behind and left in gone))]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Loaded when it is first needed: only stop strings and prompts that come as text need it."""
        try:
            return AutoTokenizer.from_pretrained(self.model_path, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(f"text needs a tokenizer, and there is none in {self.model_path}: {error}") from error


def model_class(config: PretrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForMultimodalLM]:
    """With its towers where that is the only form of the model that generates text; else the model of text, as it is trained."""
    seeing = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    reading = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return AutoModelForMultimodalLM if seeing is not None and reading in (None, seeing) else AutoModelForCausalLM


def most_of_each(section: EngineSection, config: PretrainedConfig) -> dict[str, int]:
    """The media that the model reads, and how many of each a prompt may have."""
    if model_class(config) is AutoModelForCausalLM:
        return {}
    flags = {"images": section.limit_mm_image_per_prompt, "videos": section.limit_mm_video_per_prompt,
             "audios": section.limit_mm_audio_per_prompt}
    known = placeholders(config)
    return {name: flags[name] for name, medium in MEDIA.items() if known[medium]}


def published_names(config: PretrainedConfig, *, trust_remote_code: bool = False) -> PublishedNames:
    """The weights of the model that an engine loads: what one stream must bring, and what engines call it."""
    with torch.device("meta"):
        return PublishedNames(model_class(config).from_config(config, trust_remote_code=trust_remote_code))


def end_token_ids(model_path: str, config: PretrainedConfig) -> frozenset[int]:
    """Tokens that end a response: of generation_config.json where there is one, else of the model's configuration."""
    try:
        ids = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # no generation_config.json
        ids = None
    if ids is None:
        ids = config.get_text_config().eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def placeholder_token_ids(config: PretrainedConfig) -> tuple[int, ...]:
    """Tokens that stand for media in prompts; none for a model of text."""
    return tuple(sorted(frozenset().union(*placeholders(config).values())))


def placeholders(config: PretrainedConfig) -> dict[str, frozenset[int]]:
    """The same by medium."""
    parts = config, config.get_text_config()
    found = {medium: [getattr(part, name, None) for part in parts for name in names] for medium, names in PLACEHOLDERS.items()}
    return {medium: frozenset(token for token in tokens if isinstance(token, int)) for medium, tokens in found.items()}
