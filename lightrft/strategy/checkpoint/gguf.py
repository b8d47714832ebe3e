"""Convert GGUF files, llama.cpp's format of a model in one file, to Hugging Face folders.

transformers reads them with the package gguf. It ignores tensors and settings that it does not
know, so this file refuses them or adds what is missing: the rotary frequencies of Llama 3, digits
that are tokens of their own, and tokens at the start of texts.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightrft.config.errors import ConfigError
from lightrft.config.tables import table
from lightrft.models.weight_files import check_finite, refuse_tensors, stored_tensors
from lightrft.strategy.checkpoint.hf_export import export_whole

GGUF_FACTS: dict[str, Any] = table("strategy/checkpoint/gguf")
"""What transformers does not know of these files."""
LLAMA_FREQUENCIES = "rope_freqs.weight"
"""Tensor with the divisors of the rotary frequencies; llama.cpp computes it from Llama 3's
settings.
"""
SPACE = "\u2581"
"""Sign for a space in the tokens of SentencePiece."""


def convert(file: Path, folder: Path) -> Path:
    """Write the model of a GGUF file as a Hugging Face folder, completely or not at all.

    It is dequantized and in bfloat16. If the file is damaged or one of several parts, or if not all
    of it would be read, raise a ConfigError that names it.
    """
    try:
        reader = GGUFReader(file)
    except Exception as error:  # numpy fails where the file ends or is damaged
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{file} is not a complete GGUF file ({reason}): download or copy it again"
        ) from error
    settings = {name: field.contents() for name, field in reader.fields.items()}
    if settings.get("split.count", 1) > 1:
        raise ConfigError(
            f"{file} is one of {settings['split.count']} parts: join them with llama-gguf-split"
            " --merge"
        )

    with tempfile.TemporaryDirectory() as alone:  # files beside the original belong to other models
        (Path(alone) / file.name).symlink_to(file.resolve())
        try:
            model = _model(Path(alone), file.name, reader, settings)
            tokenizer = _tokenizer(Path(alone), file.name, settings)
        except Exception as error:  # transformers has no class of its own for what it cannot read
            family = settings.get("general.architecture")
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(f"{file} ({family}) cannot be read ({reason})") from error
        return export_whole(model, tokenizer, folder, torch.bfloat16)


def _model(
    folder: Path, name: str, reader: GGUFReader, settings: dict[str, Any]
) -> transformers.PreTrainedModel:
    family = settings["general.architecture"]
    sizes = {
        field: settings[f"{family}.{key}"]
        for key, field in GGUF_FACTS["settings"].items()
        if f"{family}.{key}" in settings
    }
    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=name, **sizes)
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        config=config,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    for parameter, stored, expected in sorted(loaded["mismatched_keys"]):
        raise ValueError(
            f"{parameter} has shape {tuple(stored)} in the file, but {tuple(expected)} in the model"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    frequencies = tensors.pop(LLAMA_FREQUENCIES, None)

    _check_complete(
        model, loaded["missing_keys"], sum(int(tensor.n_elements) for tensor in tensors.values())
    )
    if frequencies is not None:
        model.config.rope_parameters |= _rope_of_llama_3(
            model, torch.from_numpy(frequencies.data.copy())
        )

    _check_settings(
        model.config, {key.removeprefix(f"{family}."): value for key, value in settings.items()}
    )

    # the title in the file, which is no name of a folder
    vars(model.config).pop("_model_name_or_path", None)
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = transformers.GenerationConfig(
        **{end: getattr(model.config, end, None) for end in ends}
    )

    return model


def _check_complete(model: transformers.PreTrainedModel, missing: set[str], numbers: int) -> None:
    """Raise ValueError unless the file fills the whole model with finite numbers.

    It must not hold anything else.
    """
    refuse_tensors(missing, "of the model are not in it")
    # tied tensors once
    stored = {id(tensor): (name, tensor) for name, tensor in stored_tensors(model).items()}
    read = sum(tensor.numel() for _, tensor in stored.values())
    if read != numbers:
        raise ValueError(
            f"it holds {numbers:,} numbers, but transformers reads {read:,} for"
            f" {type(model).__name__}"
        )

    with torch.device("meta"):
        shapes = {
            name: tensor.shape for name, tensor in stored_tensors(type(model)(model.config)).items()
        }

    for name, tensor in stored.values():
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but {tuple(shapes[name])} in the model of"
                " its settings"
            )
        check_finite(name, tensor.detach())


def _check_settings(config: transformers.PretrainedConfig, settings: dict[str, Any]) -> None:
    """Raise ValueError for settings of the attention that transformers ignores in some families."""
    rope = getattr(config, "rope_parameters", None) or {}
    # some families have one for each kind of layer
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    found = {
        "rope.freq_base": {each.get("rope_theta") for each in ropes},
        "rope.scaling.type": {"none"} | {each.get("rope_type") for each in ropes},
        "attention.sliding_window": {getattr(config, "sliding_window", None)},
    }

    for key, values in found.items():
        if settings.get(key) and settings[key] not in values:
            raise ValueError(f"transformers does not read its setting {key} {settings[key]}")


def _rope_of_llama_3(model: transformers.PreTrainedModel, divisors: Tensor) -> dict[str, Any]:
    """Return the rotary settings that give these divisors of the frequencies.

    Raise ValueError if Llama 3's settings do not.
    """
    plain = model.config.rope_parameters
    config = model.config
    rope = plain | GGUF_FACTS["llama_3_rope"] | {"factor": divisors.max().item()}
    default = plain["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    config.rope_parameters = rope
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    config.rope_parameters = plain
    if not torch.allclose(frequencies, default / divisors, rtol=1e-4, atol=0):
        raise ValueError(f"the rotary frequencies in {LLAMA_FREQUENCIES} are not Llama 3's")
    return rope


def _tokenizer(
    folder: Path, name: str, settings: dict[str, Any]
) -> transformers.PreTrainedTokenizerBase:
    read = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    content = json.loads(read.backend_tokenizer.to_str())
    # transformers adds GPT-2's end token to vocabularies without it, where no model has a row for
    # it.
    content["added_tokens"] = [
        token
        for token in content["added_tokens"]
        if token["id"] < len(settings["tokenizer.ggml.tokens"])
    ]
    backend = Tokenizer.from_str(json.dumps(content))

    begins = True

    if settings["tokenizer.ggml.model"] == "gpt2":
        pieces = settings.get("tokenizer.ggml.pre", "default")
        if pieces in GGUF_FACTS["single_digits"]:
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        elif pieces not in GGUF_PRE_TOKENIZER_SPLITS.keys() | GGUF_FACTS["like_gpt_2"]:
            raise ValueError(
                f"its pre-tokenizer {pieces!r} is unknown, so text would become other tokens than"
                " in training"
            )

        backend.model.ignore_merges = begins = pieces in GGUF_FACTS["whole_words"]
    else:
        first, *_ = backend.encode("a", add_special_tokens=False).tokens
        if first.startswith(SPACE) != settings.get("tokenizer.ggml.add_space_prefix", True):
            raise ValueError(
                "transformers does not read its setting tokenizer.ggml.add_space_prefix"
            )

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=read.chat_template,
        add_bos_token=settings.get("tokenizer.ggml.add_bos_token", begins),
        **read.special_tokens_map,
    )
