"""Configurations of models whose folder is not on this machine; plans need no weights."""

import json
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from lightrft.config.errors import ConfigError
from lightrft.config.tables import table
from lightrft.models.qwen_omni import load_config, trained_config
from lightrft.models.weight_files import cached_folder, hub_folder

KNOWN_SHAPES = table("extras/tools/shapes")
ENDINGS = ("", "-Instruct", "-Base")


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
    for family in KNOWN_SHAPES["families"]:
        for size, numbers in family["sizes"].items():
            if name in [f"{family['name']}{size}{ending}" for ending in ENDINGS]:
                tied = size in KNOWN_SHAPES["tied"]
                values = {key: family[key] for key in family.keys() - {"name", "sizes"}}
                if tied and family["model_type"] == "qwen2":
                    values["vocab_size"] = 151936
                shape = dict(zip(KNOWN_SHAPES["fields"], numbers, strict=False))
                return AutoConfig.for_model(**values, **shape, tie_word_embeddings=tied)

    return None
