"""The thinker of Qwen2.5-Omni as a model with a backbone and a head.

The thinker reads media and writes text. A released folder has two other models, talker and
token2wav, that speak what the thinker writes. They are neither loaded nor trained, and an exported
folder contains them unchanged. transformers' class of the thinker has decoder, towers and head side
by side, and computes logits of all tokens in any forward pass. Here the head is outside of the
backbone, as in other families, so log-probs, critics and every way of dividing a model work as they
do there. Code and parameters of the models are transformers'.
"""

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniThinkerConfig,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniPreTrainedModel,
    Qwen2_5OmniThinkerForConditionalGeneration,
)
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

POSITIVE_SIZES = tuple(
    """hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size
    vocab_size""".split()
)
"""Numbers of a configuration that are above 0.

Some families have a list, with a number for each layer.
"""
MAX_SIZE = 1 << 31
OTHER_PREFIXES = ("talker.", "token2wav.")
"""Beginnings of the names of weights that are not the thinker's."""
OPTIONAL_FILE = {
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}
"""Options of cached_file() for a file that a model may lack."""


class OmniThinkerConfig(Qwen2_5OmniThinkerConfig):
    """Configuration of a thinker.

    The Auto classes of transformers create this module's model from it.
    """


class OmniThinkerPreTrainedModel(Qwen2_5OmniPreTrainedModel):
    config: OmniThinkerConfig
    base_model_prefix = "model"
    _keys_to_ignore_on_load_unexpected = [f"^{prefix[:-1]}\\." for prefix in OTHER_PREFIXES]


class OmniThinkerModel(Qwen2_5OmniThinkerForConditionalGeneration):
    """Towers and decoder of a thinker."""

    config: OmniThinkerConfig
    _tied_weights_keys: dict[str, str] = {}

    def __init__(self, config: OmniThinkerConfig):
        super().__init__(config)
        # The logits of transformers' forward are then hidden states.
        self.lm_head = nn.Identity()

    def forward(self, *args: Any, **inputs: Any) -> BaseModelOutputWithPast:
        output = super().forward(*args, **inputs)
        return BaseModelOutputWithPast(
            last_hidden_state=output.logits, past_key_values=output.past_key_values
        )


class OmniThinkerForConditionalGeneration(OmniThinkerPreTrainedModel, GenerationMixin):
    """Thinker with its head."""

    _tied_weights_keys = {"lm_head.weight": "model.model.embed_tokens.weight"}

    def __init__(self, config: OmniThinkerConfig):
        super().__init__(config)
        self.model = OmniThinkerModel(config)
        self.lm_head = nn.Linear(
            config.text_config.hidden_size, config.text_config.vocab_size, bias=False
        )
        self.post_init()

    def get_decoder(self) -> nn.Module:
        return self.model.get_decoder()

    def forward(
        self, input_ids: Tensor | None = None, *, logits_to_keep: int = 0, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """Return the logits of the last `logits_to_keep` tokens of each row; 0: of all tokens."""
        output = self.model(input_ids, **inputs)
        logits = self.lm_head(output.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)


AutoModel.register(OmniThinkerConfig, OmniThinkerModel)
AutoModelForMultimodalLM.register(OmniThinkerConfig, OmniThinkerForConditionalGeneration)
register_checkpoint_conversion_mapping(
    OmniThinkerForConditionalGeneration.__name__,
    [WeightRenaming(r"^thinker\.lm_head\.", "lm_head."), WeightRenaming(r"^thinker\.", "model.")],
)


def load_config(name: str, **options: Any) -> PretrainedConfig:
    """Return the configuration of the model that is trained.

    It belongs to the folder or hub name, or to the thinker in it. `options` go to
    AutoConfig.from_pretrained(), and its OSError is raised. Raises ValueError for a config.json
    that describes no model.
    """
    try:
        config = trained_config(AutoConfig.from_pretrained(name, **options))
        sizes = {size: getattr(config.get_text_config(), size, None) for size in POSITIVE_SIZES}
    except (OSError, ValueError):
        raise
    except Exception as error:  # transformers takes the content for what it should be
        raise ValueError(
            f"{name}: its config.json describes no model ({type(error).__name__}: {error})"
        ) from error

    if wrong := [
        f"{size} is {value!r:.50}"
        for size, value in sizes.items()
        if value is not None and not _is_size(value)
    ]:
        raise ValueError(f"{name}: its config.json describes no model: {', '.join(wrong)}")

    return config


def generating_class(
    config: PretrainedConfig,
) -> type[AutoModelForCausalLM] | type[AutoModelForMultimodalLM]:
    """Return the auto class of the model that is trained: one that generates text.

    Some families have one class with towers and one that only reads text, as Qwen3.5 does. Its
    folders name the class with towers; a configuration that names neither gets the other one.
    """
    seeing = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    if seeing is None:
        return AutoModelForCausalLM

    reading = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    named = config.architectures or ()
    has_towers = reading in (None, seeing) or seeing.__name__ in named
    return AutoModelForMultimodalLM if has_towers else AutoModelForCausalLM


def _is_size(value: Any) -> bool:
    return 0 < value <= MAX_SIZE if isinstance(value, int) else isinstance(value, list | tuple)


def load_generation_config(name: str) -> GenerationConfig | None:
    """Return the generation_config.json of a folder or hub name; None if it has none.

    Raise ValueError if it cannot be read, or has end tokens that are not ids.
    """
    file = cached_file(name, GENERATION_CONFIG_NAME, **OPTIONAL_FILE)
    if file is None:
        return None

    try:
        config = GenerationConfig.from_pretrained(Path(file).parent)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not a valid generation configuration ({error})") from error

    ends = config.eos_token_id
    if not all(type(token) is int for token in (ends if isinstance(ends, list) else [ends or 0])):
        raise ValueError(f"{file} has the eos_token_id {ends!r}, not an id or a list of ids")
    return config


def trained_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the thinker for a Qwen2.5-Omni, and `config` for other families.

    A Qwen2.5-Omni may be whole or the thinker alone.
    """
    if not isinstance(config, Qwen2_5OmniConfig | Qwen2_5OmniThinkerConfig):
        return config
    source = config.thinker_config if isinstance(config, Qwen2_5OmniConfig) else config
    thinker = OmniThinkerConfig.from_dict(source.to_dict())
    thinker.name_or_path = config.name_or_path
    thinker.num_labels = config.num_labels
    return thinker


def whole_config(name: str) -> Qwen2_5OmniConfig | None:
    """Return the configuration of a whole Qwen2.5-Omni; None for a thinker alone.

    It is in a folder or on the hub.
    """
    config = AutoConfig.from_pretrained(name) if name else None
    return config if isinstance(config, Qwen2_5OmniConfig) else None


def speaks(model: PreTrainedModel) -> bool:
    """Return True for the thinker of a folder that has talker and token2wav."""
    omni = None
    if isinstance(model, OmniThinkerForConditionalGeneration):
        omni = whole_config(model.name_or_path)
    return omni is not None and omni.enable_audio_output


def published_config(model: PreTrainedModel, config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration for a folder with a model's published names.

    `config` is the model's own, and may be changed. A thinker gets the configuration of the whole
    folder, with this thinker in it; without talker if the folder has a thinker alone.
    """
    if not isinstance(model, OmniThinkerForConditionalGeneration):
        return config
    omni = whole_config(model.name_or_path) or Qwen2_5OmniConfig(enable_audio_output=False)
    config.architectures = [Qwen2_5OmniThinkerForConditionalGeneration.__name__]
    omni.thinker_config = config
    omni.dtype = config.dtype
    omni.architectures = omni.architectures or [Qwen2_5OmniForConditionalGeneration.__name__]
    return omni
