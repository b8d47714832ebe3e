"""Make a small model that computes like a large one.

Sizes shrink: hidden states, heads, experts, the vocabulary and the number of layers. Behaviour
stays: rotary embeddings, windows, sinks, soft caps, scales, types of layers. Windows and soft caps
shrink too, so that short sequences and random weights notice them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from lightrft.config.tables import table
from lightrft.models.empty import real_parameters
from lightrft.models.load import Scores, new_model
from lightrft.models.parallel.device import random_state_kept

HEAD_DIM = 8
MAX_LAYERS = 4
MAX_PARAMETERS = 30_000_000
"""A copy with more has sizes under unknown names, and would cost seconds and memory."""
SMALL_VOCABULARY = 64
FIRST_TOKEN = 8
"""Token ids of a small vocabulary below this one have a meaning, such as padding."""


def _by_name(part: str, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return name -> size of a part of small_sizes.yaml, whose keys may be names of `sizes`."""
    names = table("app/trainer/small_sizes")[part]
    return {name: sizes[size] if sizes else size for size in names for name in names[size].split()}


SMALL_SIZES = _by_name("largest")
"""Largest values of a small configuration, under the names of transformers.

Names with dependencies are in _heads().
"""
DERIVED: list[str] = table("app/trainer/small_sizes")["derived"]
"""Values that a configuration computes from others."""
TOWER = _by_name("tower")
"""Largest sizes of a tower."""
INDEX_LISTS: list[str] = table("app/trainer/small_sizes")["index_lists"]
"""Lists of numbers of layers."""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence transformers' remarks about sizes that do not fit a configuration."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


@without_warnings()
def small_config(config: PretrainedConfig, *, multiple: int = 1) -> PretrainedConfig:
    """Return a configuration of the same class with a layer of each type, and small sizes.

    The numbers of heads are multiples of `multiple`. Towers have one layer.
    """
    language = config.get_text_config()
    values = config.to_dict()
    values.pop("quantization_config", None)
    for name in config.sub_configs:
        sub_config = getattr(config, name, None)
        if sub_config is language:
            values[name] = _small(sub_config, sub_config.to_dict(), multiple)
        elif sub_config is not None:
            values[name] = _tower(sub_config.to_dict())

    if language is config:
        return type(config).from_dict(_small(config, values, multiple))
    # Otherwise the tokens of media are outside of the vocabulary.
    return type(config).from_dict(_small_tokens(values))


def small_model(
    config: PretrainedConfig,
    attention: str | dict[str, str | None],
    *,
    scores: bool = False,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model of a small configuration with random weights in float32, on the CPU.

    It generates, or `scores` each token with a head of one output.

    Norms, biases and sinks are random too, so that a difference there shows. Equal seeds give equal
    weights. Random generators are as before. Raise ValueError if it is not small.
    """
    options = {"attention": attention, "trust_remote_code": trust_remote_code}
    if scores:
        config.num_labels = 1
        options["kind"] = Scores
    with random_state_kept(torch.device("cpu")), real_parameters(), without_warnings():
        with torch.device("meta"):
            size = sum(each.numel() for each in new_model(config, **options).parameters())
        if size > MAX_PARAMETERS:
            raise ValueError(f"a small copy still has {size / 1e6:.0f} million parameters")

        torch.default_generator.manual_seed(seed)
        with torch.device("cpu"):
            model = new_model(config, **options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.05)

    model.config.use_cache = False
    return model.eval()


def _small(config: PretrainedConfig, values: dict[str, Any], multiple: int) -> dict[str, Any]:
    """Return the values of a language model's configuration with small sizes."""
    real = config.attribute_map
    values = _fewer_layers(config, values)
    values = {name: value for name, value in values.items() if name not in DERIVED}
    for name, largest in SMALL_SIZES.items():
        name = real.get(name, name)
        if name in values:
            # Ranks that split a layer each need a shard of it.
            size = largest * multiple if "intermediate" in name else largest
            values[name] = _at_most(values[name], size)

    values |= _heads(config, values, multiple)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), dict):
            values[name] = _small_rope(values[name], values, config)
    # Random weights of this size make scores and activations as large as trained ones do.
    if "initializer_range" in values:
        values["initializer_range"] = 0.2

    return _small_tokens(values)


def _at_most(value: Any, largest: float) -> Any:
    if isinstance(value, list):
        return [_at_most(each, largest) for each in value]
    return min(value, largest) if type(value) in (int, float) else value


def _heads(config: PretrainedConfig, values: dict[str, Any], multiple: int) -> dict[str, Any]:
    """Return numbers of heads in the ratio of the configuration, and the sizes that follow."""
    num_heads = getattr(config, "num_attention_heads", None)
    if not isinstance(num_heads, int):
        return {}

    kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    ratio = min(4, num_heads // kv_heads) if isinstance(kv_heads, int) else 1
    kv_small = multiple * (1 if kv_heads == 1 else 2)
    heads = kv_small * max(ratio, 4 // kv_small)
    kv_small = heads // max(ratio, 1) if kv_heads == num_heads else kv_small
    hidden = heads * HEAD_DIM
    expand = next((values[n] for n in ("mamba_expand", "expand") if values.get(n)), 2)
    ssm_heads = int(expand * hidden) // HEAD_DIM

    key_heads = values.get("linear_num_key_heads")
    value_heads = values.get("linear_num_value_heads")
    value_small = 4 * multiple
    per_key = min(4, value_heads // key_heads) if key_heads and value_heads else 1
    numbers = {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_small,
        "ssm_heads": ssm_heads,
        "ssm_hidden": int(expand * hidden),
        "linear_heads": value_small,
        "linear_key_heads": value_small // per_key,
        "vocabulary": SMALL_VOCABULARY * multiple,
    }
    sizes = _by_name("computed", numbers)
    # With latent attention some families mean a slice of a head, and others the whole.
    dims = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if None not in dims and getattr(config, "head_dim", None) == sum(dims):
        sizes["head_dim"] = 2 * HEAD_DIM

    real = {config.attribute_map.get(name, name): size for name, size in sizes.items()}
    return {name: size for name, size in real.items() if isinstance(values.get(name), int)}


def _fewer_layers(config: PretrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Keep the first layer of each type, at least two layers and at most MAX_LAYERS."""
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    total = getattr(config, "num_hidden_layers", None)
    if not isinstance(total, int):
        return values

    lists = {
        key: value
        for key, value in values.items()
        if isinstance(value, list) and len(value) == total
    }
    # Properties of a class also say which layers are alike.
    computed = {
        key: value
        for key in ("layer_types", "layers_block_type")
        if isinstance(value := getattr(config, key, None), list) and len(value) == total
    }
    numbers = {key: values[key] for key in INDEX_LISTS if isinstance(values.get(key), list)}
    # A list of types has few different ones, and a list of sizes has many.
    every = (lists | computed).values()
    types = [value for value in every if len({repr(each) for each in value}) <= MAX_LAYERS]
    kinds = [
        repr([value[layer] for value in types])
        + repr([layer in value for value in numbers.values()])
        for layer in range(total)
    ]
    kept = sorted(kinds.index(kind) for kind in dict.fromkeys(kinds))[:MAX_LAYERS]
    # The last layers of some families reuse the keys and values of earlier ones of their types.
    shares = values.get("num_kv_shared_layers")
    if shares and total > shares:
        last_kinds = sorted({kinds.index(kind) for kind in set(kinds[total - shares :])})
        kept = [layer for layer in last_kinds if layer < total - shares]
        values = values | {"num_kv_shared_layers": len(kept)}
        kept = kept * 2
    elif len(kept) == 1:
        kept = kept * 2

    changed = {key: [value[layer] for layer in kept] for key, value in lists.items()}
    changed |= {
        key: [index for index, layer in enumerate(kept) if layer in value]
        for key, value in numbers.items()
    }
    if name in values:
        changed[name] = len(kept)
    # LongCat has two attentions in each of its `num_layers` blocks.
    blocks = values.get("num_layers")
    if isinstance(blocks, int) and blocks != total:
        changed |= {name: len(kept) * total // blocks, "num_layers": len(kept)}
    if isinstance(special := values.get("per_layer_config"), dict):
        # Heads of some layers are larger, as in Gemma 4.
        of_layer = {int(layer): settings for layer, settings in special.items()}
        changed["per_layer_config"] = {
            index: {
                key: _at_most(value, 2 * SMALL_SIZES.get(key, value))
                for key, value in settings.items()
            }
            for index, layer in enumerate(kept)
            if (settings := of_layer.get(layer)) is not None
        }
    return values | changed


def _small_rope(
    rope: dict[str, Any], values: dict[str, Any], config: PretrainedConfig
) -> dict[str, Any]:
    """Shorten the lists of frequencies, and divide the sections of M-RoPE."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {
            name: _small_rope(value, values, config) if isinstance(value, dict) else value
            for name, value in rope.items()
        }

    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1
    dim = values.get("qk_rope_head_dim") or int(HEAD_DIM * share)
    rope = dict(rope)
    for name in ("long_factor", "short_factor"):
        if isinstance(rope.get(name), list):
            rope[name] = rope[name][: dim // 2]
    if sections := rope.get("mrope_section"):
        small = [max(1, size * (dim // 2) // sum(sections)) for size in sections]
        small[0] += dim // 2 - sum(small)
        rope["mrope_section"] = small
    return rope


def _small_tokens(values: dict[str, Any]) -> dict[str, Any]:
    """Move special tokens to the beginning of the small vocabulary."""
    small = {
        name: _at_most(value, FIRST_TOKEN - 1)
        for name, value in values.items()
        if name.endswith(("_token_id", "_token_ids", "_token_index"))
    }
    return values | small


def _tower(values: dict[str, Any]) -> dict[str, Any]:
    """Return a tower of one small layer; it computes nothing here."""
    layers = {values.get(name) for name in ("num_hidden_layers", "depth") if values.get(name)}
    lists = {
        name: value[:1]
        for name, value in values.items()
        if isinstance(value, list) and len(value) in layers
    }
    small = {
        name: min(values[name], size)
        for name, size in TOWER.items()
        if isinstance(values.get(name), int)
    }
    return values | lists | small
