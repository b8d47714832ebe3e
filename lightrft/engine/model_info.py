"""Read from a model's folder what an engine needs to know before it has weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Self

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from lightrft.config.sections import EngineSection
from lightrft.core.engine import MEDIA_NAMES
from lightrft.models.qwen_omni import generating_class, load_config, load_generation_config
from lightrft.models.weight_sync.names import DRAFT, PublishedNames

PLACEHOLDERS = {
    medium: (f"{medium}_token_id", f"{medium}_token_index") for medium in MEDIA_NAMES.values()
}
"""Medium -> fields of a model configuration that may contain the medium's placeholder token."""
HEARS_ONLY = ("qwen2_5_omni_thinker",)
"""Families that read images and videos too, but only sound was compared with transformers."""
IN_PROMPTS: Mapping[str, Mapping[str, str]] = {"gemma3": {"image": "boi_token_id"}}
"""Model type -> medium -> field with the token that stands for it in prompts, where the expansion
uses another one."""
FRAME = ("vision_start_token_id", "vision_end_token_id")
"""Fields with the tokens that some models need before and after a placeholder."""


@dataclass(frozen=True)
class Vocabulary:
    """A model's vocabulary and special tokens."""

    size: int
    """Rows of the output embedding."""
    end_token_ids: frozenset[int]
    placeholder_token_ids: frozenset[int]
    """Tokens that stand for media in prompts. A response that contains one cannot be processed as
    input."""
    model_path: str
    trust_remote_code: bool = False
    placeholders: dict[str, frozenset[int]] = field(default_factory=dict)
    """Placeholder tokens by medium: image, video, audio."""
    frame: tuple[int, int] | None = None
    """Tokens before and after a placeholder, if the model has them."""
    unknown_token_ids: tuple[int, ...] = ()
    """Rows of the output embedding that the tokenizer has no token for, mostly padding. No text
    would contain them."""

    @classmethod
    def of(
        cls, model_path: str, config: PretrainedConfig, *, trust_remote_code: bool = False
    ) -> Self:
        ends = end_token_ids(model_path, config)
        frame = tuple(token for name in FRAME if (token := getattr(config, name, None)) is not None)
        size = config.get_text_config().vocab_size
        vocabulary = cls(
            size,
            ends,
            placeholder_token_ids(config),
            model_path,
            trust_remote_code,
            placeholders(config),
            frame if len(frame) == len(FRAME) else None,
        )

        try:
            return replace(
                vocabulary, unknown_token_ids=unknown_token_ids(vocabulary.tokenizer, size)
            )
        except ValueError:  # a folder without a tokenizer serves prompts of tokens
            return vocabulary

    @cached_property
    def never_sampled(self) -> tuple[int, ...]:
        """Return the tokens that no response contains: placeholders, and ids without a token."""
        return tuple(sorted({*self.placeholder_token_ids, *self.unknown_token_ids}))

    def num_placeholders(self, token_ids: list[int], medium: str) -> int:
        return sum(token in self.placeholders.get(medium, ()) for token in token_ids)

    def without_placeholders(self, token_ids: list[int], medium: str) -> list[int]:
        """Remove the placeholders of this medium from a prompt, and the tokens that frame them."""
        gone = self.placeholders.get(medium, frozenset())
        before, after = self.frame or (None, None)
        around = zip([None, *token_ids], token_ids, [*token_ids[1:], None], strict=False)

        return [
            token
            for left, token, right in around
            if not (
                token in gone
                or (token == before and right in gone)
                or (token == after and left in gone)
            )
        ]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer at first use, because only stop strings and text prompts need it.

        Raises ValueError if there is none.
        """
        try:
            return AutoTokenizer.from_pretrained(
                self.model_path, trust_remote_code=self.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"text prompts need a tokenizer, and there is none in {self.model_path}: {error}"
            ) from error


def has_recurrent_state(config: PretrainedConfig) -> bool:
    """Return True if layers read earlier tokens through a state or a convolution."""
    layers = DynamicCache(config=config).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def num_attention_layers(config: PretrainedConfig) -> int:
    """Return the number of layers that keep keys and values of each token."""
    layers = DynamicCache(config=config).layers
    return sum(isinstance(layer, DynamicLayer) for layer in layers)


def media_limits(section: EngineSection, config: PretrainedConfig) -> dict[str, int]:
    """Return the media that the model reads, and how many of each a prompt may have."""
    if generating_class(config) is AutoModelForCausalLM:
        return {}

    media_tokens = placeholders(config)
    return {
        name: getattr(section, f"limit_mm_{medium}_per_prompt")
        for name, medium in MEDIA_NAMES.items()
        if media_tokens[medium] and (name == "audios" or config.model_type not in HEARS_ONLY)
    }


def published_names(config: PretrainedConfig, *, trust_remote_code: bool = False) -> PublishedNames:
    """Return the names and shapes of the weights that a stream must bring, and published names."""
    with torch.device("meta"):
        return PublishedNames(
            generating_class(config).from_config(config, trust_remote_code=trust_remote_code)
        )


def draft_names(section: EngineSection, *, trust_remote_code: bool = False) -> PublishedNames:
    """Return the names and shapes of --draft_pretrain's weights, without the stream's prefix."""
    config = load_config(section.draft_pretrain, trust_remote_code=trust_remote_code)
    return published_names(config, trust_remote_code=trust_remote_code)


def with_prefix(names: PublishedNames) -> dict[str, torch.Size]:
    """Return the names of a draft model's weights in a stream, with the shapes."""
    return {DRAFT + name: shape for name, shape in names.shapes.items()}


def end_token_ids(model_path: str, config: PretrainedConfig) -> frozenset[int]:
    """Return the tokens that end a response.

    They come from generation_config.json, or from the model's configuration if it has none.
    """
    sources = load_generation_config(model_path), config.get_text_config(), config
    found = (getattr(source, "eos_token_id", None) for source in sources)
    ids = next((ids for ids in found if ids is not None), ())
    return frozenset([ids] if isinstance(ids, int) else ids)


def unknown_token_ids(tokenizer: Tokenizer, size: int) -> tuple[int, ...]:
    """Return the ids below `size` that the tokenizer lacks, in order.

    There are none if the tokenizer has no vocabulary at all.
    """
    vocabulary = tokenizer.get_vocab()
    if set(vocabulary) <= set(tokenizer.all_special_tokens):
        return ()  # the folder has no tokenizer files
    used = set(vocabulary.values())
    return tuple(token for token in range(size) if token not in used)


def never_sampled(
    model_path: str, config: PretrainedConfig, tokenizer: Tokenizer | None = None
) -> tuple[int, ...]:
    """Return the tokens that no engine samples, like Vocabulary.never_sampled.

    Without a tokenizer, the one of the folder counts.
    """
    if tokenizer is None:
        return Vocabulary.of(model_path, config).never_sampled
    unknown = unknown_token_ids(tokenizer, config.get_text_config().vocab_size)
    return tuple(sorted({*placeholder_token_ids(config), *unknown}))


def placeholder_token_ids(config: PretrainedConfig) -> frozenset[int]:
    """Return the tokens that stand for media, expanded or not; none for a text-only model."""
    tokens = placeholders(config).values(), _expanded_tokens(config).values()
    return frozenset().union(*chain(*tokens))


def placeholders(config: PretrainedConfig) -> dict[str, frozenset[int]]:
    """Return the placeholder tokens by medium."""
    others = IN_PROMPTS.get(config.model_type, {})
    return _expanded_tokens(config) | {
        medium: frozenset([getattr(config, name)]) for medium, name in others.items()
    }


def _expanded_tokens(config: PretrainedConfig) -> dict[str, frozenset[int]]:
    """Return, by medium, the tokens whose embeddings are replaced."""
    configs = config, config.get_text_config()
    values = {
        medium: [getattr(candidate, name, None) for candidate in configs for name in names]
        for medium, names in PLACEHOLDERS.items()
    }
    return {
        medium: frozenset(token for token in tokens if isinstance(token, int))
        for medium, tokens in values.items()
    }
