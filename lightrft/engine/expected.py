"""What a model's folder tells an engine before there are weights."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

PLACEHOLDERS = [f"{medium}_token_{kind}" for medium in ("image", "video", "audio") for kind in ("id", "index")]
"""Where configurations name the token that stands for a part of an image, a video or a sound."""


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

    @classmethod
    def of(cls, model_path: str, config: PretrainedConfig, *, trust_remote_code: bool = False) -> Self:
        ends = end_token_ids(model_path, config)
        return cls(config.get_text_config().vocab_size, ends, placeholder_token_ids(config), model_path, trust_remote_code)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Loaded when it is first needed: only stop strings need it."""
        try:
            return AutoTokenizer.from_pretrained(self.model_path, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(f"stop strings need a tokenizer, and there is none in {self.model_path}: {error}") from error


def expected_parameters(config: PretrainedConfig, *, trust_remote_code: bool = False) -> dict[str, torch.Size]:
    """Hugging Face name -> full shape of what one weight stream must bring: parameters, tied ones once, persistent buffers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    saved = model.state_dict()
    buffers = {name: buffer.shape for name, buffer in model.named_buffers() if name in saved}
    return {name: parameter.shape for name, parameter in model.named_parameters()} | buffers


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
    found = (getattr(part, name, None) for part in (config, config.get_text_config()) for name in PLACEHOLDERS)
    return tuple(sorted({token for token in found if isinstance(token, int)}))
