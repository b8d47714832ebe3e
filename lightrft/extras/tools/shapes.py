"""Configurations of models whose folder is not on this machine; plans need no weights."""

import json
from pathlib import Path

from transformers import (
    AutoConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lightrft.config.errors import ConfigError
from lightrft.models.qwen_omni import load_config, trained_config
from lightrft.models.weight_files import cached_folder, hub_folder

QWEN2 = {
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "3B": (2048, 11008, 36, 16, 2),
    "7B": (3584, 18944, 28, 28, 4),
    "14B": (5120, 13824, 48, 40, 8),
    "32B": (5120, 27648, 64, 40, 8),
    "72B": (8192, 29568, 80, 64, 8),
}
"""Size of Qwen2.5 -> the numbers that SHAPE names. They come from their config.json."""
QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, 8),
    "1.7B": (2048, 6144, 28, 16, 8),
    "4B": (2560, 9728, 36, 32, 8),
    "8B": (4096, 12288, 36, 32, 8),
    "14B": (5120, 17408, 40, 40, 8),
    "32B": (5120, 25600, 64, 64, 8),
}
QWEN3_MOE = {"30B-A3B": (2048, 6144, 48, 32, 4, 768), "235B-A22B": (4096, 12288, 94, 64, 4, 1536)}
"""The last number is the intermediate size of an expert."""
LLAMA = {"8B": (4096, 14336, 32, 32, 8), "70B": (8192, 28672, 80, 64, 8)}
TIED = ("0.5B", "1.5B", "3B", "0.6B", "1.7B", "4B")
"""Sizes whose head is the embedding."""
SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "moe_intermediate_size"),
)
OF_QWEN3 = {"vocab_size": 151936, "head_dim": 128}
OF_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8}
KNOWN_FAMILIES = (
    ("Qwen/Qwen2.5-", Qwen2Config, QWEN2, {"vocab_size": 152064}),
    ("Qwen/Qwen3-", Qwen3Config, QWEN3, OF_QWEN3),
    ("Qwen/Qwen3-", Qwen3MoeConfig, QWEN3_MOE, OF_QWEN3 | OF_EXPERTS),
    ("meta-llama/Llama-3.1-", LlamaConfig, LLAMA, {"vocab_size": 128256}),
)
"""Beginning of a name, class, sizes, and what models of all sizes have in common."""


def model_config(name: str, file: str = "") -> PretrainedConfig:
    """Return the configuration of a model.

    It comes from `file`, from the model's folder, from the hub's cache, from a well-known name, or
    from the hub. Raise ConfigError if there is none. A machine without network does not wait for
    the hub where the shape is known.
    """
    folder = cached_folder(name)
    if not (file or folder) and (known := known_config(name)):
        return known
    try:
        if file:
            values = json.loads(Path(file).read_text())
            return trained_config(AutoConfig.for_model(values.pop("model_type"), **values))
        return load_config(str(folder or hub_folder(name)), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--pretrain {name}: its config.json cannot be read ({type(error).__name__}); download"
            " it and set --model_config FILE"
        ) from error


def known_config(name: str) -> PretrainedConfig | None:
    """Return the configuration of a Qwen2.5, Qwen3 or Llama 3.1 model by hub name.

    None for others.
    """
    # Coder and Math have the same shapes.
    name = name.replace("Qwen2.5-Coder-", "Qwen2.5-").replace("Qwen2.5-Math-", "Qwen2.5-")
    for prefix, kind, sizes, values in KNOWN_FAMILIES:
        for size, numbers in sizes.items():
            if name in [f"{prefix}{size}{ending}" for ending in ("", "-Instruct", "-Base")]:
                tied = size in TIED
                changed = {"vocab_size": 151936} if kind is Qwen2Config and tied else {}
                shape = dict(zip(SHAPE, numbers, strict=False))
                return kind(**shape, **values | changed, tie_word_embeddings=tied)

    return None
