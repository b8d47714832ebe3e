"""Models and tokenizers from a Hugging Face folder or hub name."""

import json
import logging
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from loguru import logger
from torch import nn
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from lightrft.config.errors import ConfigError
from lightrft.config.sections import ModelSection
from lightrft.models import weight_files
from lightrft.models.attention.flat import ATTENTION
from lightrft.models.attention.recurrent import install
from lightrft.models.converted_files import ConvertedFiles
from lightrft.models.empty import makes_empty, real_parameters
from lightrft.models.lora import is_adapter_folder
from lightrft.models.parallel.device import compute_capability
from lightrft.models.parallel.expert_parallel import occupy_experts
from lightrft.models.qwen_omni import generating_class, load_config, load_generation_config

SCORE = "score"
"""Name of the only head of a reward model."""
JSON_FILES = tuple(
    "config.json generation_config.json tokenizer.json tokenizer_config.json added_tokens.json".split()
)
"""Files of a model's folder that hold an object."""


def load_model(section: ModelSection, flag: str = "pretrain", *, name: str = "") -> PreTrainedModel:
    """Load the causal language model given by `flag` in float32, with attention over flat batches.

    These are the master weights. `name` is the model's name if the flag is in another section.
    Vision towers are included if the family has no other form; they are neither used nor trained
    while prompts are text. Inside init_model_context() the model may be empty: the parameters get
    memory when it is sharded. Raise ValueError for missing weights and for weights that the model
    does not have.
    """
    return _load(None, section, flag, name=name)


def load_scorer(
    section: ModelSection,
    flag: str = "pretrain",
    *,
    name: str = "",
    new_head: bool = True,
    num_heads: int = 1,
) -> PreTrainedModel:
    """Load a model with `num_heads` scores per token instead of logits.

    `name` selects one of several models given by `flag`. If the folder has no head, a new random
    one is created; without `new_head` that is an error like any missing weight. transformers has no
    such class for families that see or hear: these get scorer_class().
    """
    return _load(Scores, section, flag, name=name, new_head=new_head, num_labels=num_heads)


class Scores:
    """Auto class of models with scores."""

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> Any:
        config = options.get("config") or load_config(
            name, trust_remote_code=options["trust_remote_code"]
        )
        return cls._of(config).from_pretrained(name, **options)

    @classmethod
    def from_config(cls, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
        kind = cls._of(config)
        if kind is AutoModelForSequenceClassification:
            return kind.from_config(config, **options)
        options.pop("trust_remote_code", None)
        return kind._from_config(config, **options)

    @staticmethod
    def _of(config: PretrainedConfig) -> Any:
        has_class = type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        if has_class or generating_class(config) is AutoModelForCausalLM:
            return AutoModelForSequenceClassification
        return scorer_class(MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)])


@cache
def scorer_class(generating: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a class of the same family whose tokens have `num_labels` scores instead of logits."""
    family = next(base for base in generating.__mro__[1:] if issubclass(base, PreTrainedModel))

    class SeeingScorer(family):  # type: ignore[misc, valid-type]
        def __init__(self, config: PretrainedConfig):
            super().__init__(config)
            self.model = AutoModel.from_config(config)
            self.score = nn.Linear(
                config.get_text_config().hidden_size, config.num_labels, bias=False
            )
            self.post_init()

    SeeingScorer.__name__ = (
        generating.__name__.replace("ForConditionalGeneration", "") + "ForSequenceClassification"
    )
    names = (generating.__name__, generating.config_class.model_type)
    conversions = next(filter(None, map(get_checkpoint_conversion_mapping, names)), None)
    # Released folders have other names, and transformers finds the conversion by the name of the
    # class.
    if conversions is not None:
        register_checkpoint_conversion_mapping(SeeingScorer.__name__, conversions, overwrite=True)
    return SeeingScorer


def stored_heads(section: ModelSection, flag: str = "pretrain", *, name: str = "") -> list[str]:
    """Return the names of the scores of a model's head; empty for a model that generates.

    For `name` see load_scorer().
    """
    name, source = _checked(section, flag, name)
    try:
        config = load_config(name, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error
    scores = any(each.endswith("ForSequenceClassification") for each in config.architectures or ())
    return [config.id2label[index] for index in sorted(config.id2label)] if scores else []


def head_names(section: ModelSection, requested: Sequence[str]) -> list[str]:
    """Return the names of the heads of a reward model to train.

    They are the `requested` ones, the ones of --pretrain, or a single one. Raise ConfigError if
    --pretrain already has heads with other names.
    """
    stored = stored_heads(section)
    # transformers invents names like these for heads that have none
    named = [name for name in stored if not name.startswith("LABEL_")]
    if requested and named and set(requested) != set(named):
        raise ConfigError(
            f"--reward_heads {' '.join(requested)}: the model in --pretrain has the heads"
            f" {', '.join(named)}; omit the flag, or start from a model without heads"
        )
    return named or list(requested) or stored or [SCORE]


def load_reward_model(
    section: ModelSection, heads: Sequence[str], tokenizer: Tokenizer
) -> PreTrainedModel:
    """Load --pretrain with a score for each of the named heads.

    The heads are new if it generates text.
    """
    model = load_scorer(section, num_heads=len(heads))
    model.config.id2label = dict(enumerate(heads))
    model.config.label2id = {name: index for index, name in enumerate(heads)}
    config = model.config.get_text_config()
    if config.pad_token_id is None:  # transformers finds the last token of padded rows by it
        config.pad_token_id = tokenizer.pad_token_id
    return model


def _load(
    kind: type | None,
    section: ModelSection,
    flag: str,
    *,
    name: str = "",
    new_head: bool = False,
    **options: Any,
) -> PreTrainedModel:
    options |= {"trust_remote_code": section.trust_remote_code}
    name, source = _checked(section, flag, name)
    try:
        config = load_config(name, **options)
        if (settings := getattr(config, "quantization_config", None)) is not None:
            raise ValueError(
                f"its weights are quantized ({dict(settings).get('quant_method')}): `lightrft export"
                f" {name} FOLDER` writes a plain folder of a model in FP8 or MXFP4; --load_in_4bit"
                " quantizes the original model itself"
            )
        # Only headers are read, so a damaged file is found in the first seconds.
        if Path(name).is_dir() and (files := weight_files.WeightFiles.of(name)):
            files.check()
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error

    kind = kind or generating_class(config)
    try:
        with _replaced_attention(config):
            model = _empty(kind, name, new_head, options) if makes_empty() else None
            if model is None:
                with real_parameters():
                    model = _load_checked(kind, name, config, new_head, options)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error

    if problems := "; ".join(not_flat(model)):
        name = type(model).__name__
        raise ValueError(f"{source}: {name} cannot be trained on flat batches: {problems}")

    if compute_capability() >= (10, 0):
        occupy_experts(model)
    model.config.use_cache = False
    return model


def new_model(
    config: PretrainedConfig,
    attention: str | dict[str, str | None],
    *,
    kind: Any = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build a model with new weights in float32: one that generates, or of the Auto class `kind`.

    Raise ValueError for a family whose attention cannot be replaced.
    """
    with _replaced_attention(config):
        options = {"attn_implementation": attention, "trust_remote_code": trust_remote_code}
        kind = kind or generating_class(config)
        return kind.from_config(config, dtype=torch.float32, **options)


@contextmanager
def _replaced_attention(config: PretrainedConfig) -> Iterator[None]:
    """Raise ValueError for a model that cannot be built, or whose attention cannot be replaced."""
    try:
        yield
    # transformers takes what config.json says for what it should be.
    except (AttributeError, LookupError, TypeError, ZeroDivisionError) as error:
        # Some families look classes up by the name of the attention.
        reason = f"its config.json describes no model ({type(error).__name__}: {error})"
        if error.args == (ATTENTION,):
            reason = (
                f"the attention implementation of {config.model_type} cannot be replaced in"
                " transformers"
            )
        raise ValueError(reason) from error


def attention_of(config: PretrainedConfig) -> dict[str, str | None]:
    """Return the attention of each sub-model.

    The decoder attends over flat batches, and towers have the default of transformers.
    """
    language = config.get_text_config()
    return {"": ATTENTION} | {
        name: ATTENTION if getattr(config, name, None) is language else None
        for name in config.sub_configs
    }


def _load_checked(
    kind: type, name: str, config: PretrainedConfig, new_head: bool, options: dict[str, Any]
) -> PreTrainedModel:
    """Load the whole model on this rank with from_pretrained().

    It converts the weights where necessary.
    """
    try:
        with _without_load_report():
            model, info = kind.from_pretrained(
                name,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention_of(config),
                output_loading_info=True,
                trust_remote_code=options["trust_remote_code"],
                # mismatched shapes raise below, with the flag that named the model
                ignore_mismatched_sizes=True,
            )
    except (OSError, EOFError, IndexError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"transformers cannot read the weights ({type(error).__name__}: {error})"
        ) from error

    for stored, actual, expected in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"{stored} has shape {tuple(actual)} in the folder, but {tuple(expected)} in the model"
        )

    missing = info["missing_keys"]
    unexpected = {name for name in info["unexpected_keys"] if not weight_files.MASK.search(name)}
    if new_head:
        missing, unexpected, _ = _without_head(model, missing, unexpected)

    hint = ""
    if not model.can_generate() and min(missing, default="") == "score.weight":
        hint = ": it has a model that generates; train_rm and train_prm make models with scores"
    weight_files.refuse_tensors(missing, "of the model are not in the folder", hint)
    weight_files.refuse_tensors(unexpected, "in the folder are not in the model")

    for parameter_name, parameter in model.named_parameters():
        weight_files.check_finite(parameter_name, parameter.detach())
    return model


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Suppress the load report of transformers on every rank.

    Weight problems raise ValueError here. A report about weights that could not be converted is
    printed, because the error of transformers refers to it.
    """
    logger = logging.getLogger("transformers.modeling_utils")

    def is_needed(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "LOAD REPORT" not in text or "CONVERSION" in text

    logger.addFilter(is_needed)
    try:
        yield
    finally:
        logger.removeFilter(is_needed)


def _empty(
    kind: type, name: str, new_head: bool, options: dict[str, Any]
) -> PreTrainedModel | None:
    """Build the model without memory for the tensors in the folder.

    Return None if from_pretrained() has to read it whole.
    """
    folder = _local_folder(name)
    files = weight_files.WeightFiles.of(folder)
    config = load_config(folder, **options)
    if files is None:
        logger.info("{} has no plain safetensors files: every rank reads the whole folder", name)
        return None

    model = new_model(
        config, attention_of(config), kind=kind, trust_remote_code=options["trust_remote_code"]
    )
    # The language part of a model that sees (Qwen3.5) has a configuration without a folder.
    model.config.name_or_path = config.name_or_path
    model.name_or_path = config.name_or_path
    converted = ConvertedFiles(model, files)

    missing, unexpected = weight_files.missing_and_unexpected(model, converted.shapes)
    head: set[str] = set()
    if new_head:
        missing, unexpected, head = _without_head(model, missing, unexpected)
    # from_pretrained() may know how to read them, and otherwise says what is missing.
    if missing or unexpected:
        logger.info(
            f"the weights in {name} are not those of {type(model).__name__}: every rank reads the"
            " whole folder"
        )
        return None

    tensors = weight_files.stored_tensors(model)
    for tensor_name in sorted(converted.shapes.keys() & tensors.keys()):
        converted.check_shape(tensor_name, tensors[tensor_name].shape)

    for child_name in {name.split(".")[0] for name in head}:
        # The same random numbers as in from_pretrained().
        model._init_weights(getattr(model, child_name).to_empty(device="cpu"))
    if model.can_generate():
        model.generation_config = load_generation_config(str(folder)) or model.generation_config
    return model.eval()


def _without_head(
    model: PreTrainedModel, missing: set[str], unexpected: set[str]
) -> tuple[set[str], set[str], set[str]]:
    """Leave out the head of a new scorer, and return it too.

    The head is removed from the missing names, and the head that it replaces from the unexpected
    names.
    """
    head = {name for name in missing if not weight_files.is_backbone(model, name)}
    if head and not model.can_generate():
        missing = missing - head
        unexpected = {name for name in unexpected if weight_files.is_backbone(model, name)}
    return missing, unexpected, head


def _local_folder(name: str) -> Path:
    """Return the folder itself, or the local folder of the hub's files.

    The files are downloaded if necessary.
    """
    if Path(name).is_dir():
        return Path(name)
    return Path(
        snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.py", "spk_dict.pt"])
    )


def check_vocabulary(
    section: ModelSection, flag: str, tokenizer: Tokenizer, *, name: str = ""
) -> None:
    """Raise ValueError if the model given by `flag` has other ids for the tokens of `tokenizer`.

    It may have more tokens. `name` selects one of several models given by `flag`.
    """
    name = name or getattr(section, flag)
    vocabulary = tokenizer.get_vocab()

    other_vocabulary = load_tokenizer(section, flag, name=name).get_vocab()
    different = [token for token in vocabulary if other_vocabulary.get(token) != vocabulary[token]]
    if different:
        token = min(different, key=lambda token: vocabulary[token])
        raise ValueError(
            f"--{flag} {name} has another vocabulary: {len(different)} of the {len(vocabulary)}"
            f" tokens of --pretrain differ, the first is {token!r}, {vocabulary[token]} in"
            f" --pretrain and {other_vocabulary.get(token, 'nothing')} there"
        )


def load_tokenizer(section: ModelSection, flag: str = "pretrain", *, name: str = "") -> Tokenizer:
    """Load the tokenizer of the model given by `flag`; `name` selects one of several.

    Raise ValueError if there is no tokenizer, or if it has no end token.
    """
    name, source = _checked(section, flag, name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=section.trust_remote_code)
    except Exception as error:  # errors of the tokenizers package have no class of their own
        raise ValueError(
            f"{source} has no tokenizer that transformers can load: {error}"
        ) from error

    if tokenizer.eos_token_id is None:
        raise ValueError(f"{source}: its tokenizer has no end token, so responses would never stop")

    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"{source} has no tokenizer: the folder has no vocabulary (tokenizer.json,"
            " tokenizer.model, or vocab.json and merges.txt); copy the files of the model's"
            " tokenizer"
        )

    _check_rows(source, name, tokenizer, trust_remote_code=section.trust_remote_code)
    return tokenizer


def _check_rows(source: str, name: str, tokenizer: Tokenizer, *, trust_remote_code: bool) -> None:
    """Raise ValueError for tokens without a row in the model's embedding.

    A model may have more rows than tokens.
    """
    try:
        config = load_config(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):  # loading the model says what is wrong
        return

    rows = config.get_text_config().vocab_size
    without = sorted(
        (token_id, token) for token, token_id in tokenizer.get_vocab().items() if token_id >= rows
    )
    if without:
        raise ValueError(
            f"{source}: {len(without)} tokens of its tokenizer have no row in the embedding, which"
            f" has {rows}; the first is {without[0][1]!r}, {without[0][0]}: add rows with"
            " resize_token_embeddings() and save the model, or use the tokenizer that belongs"
            " to it"
        )


def not_flat(model: PreTrainedModel) -> list[str]:
    """Return why tokens would see other sequences of a flat batch, or too little of their own.

    May be empty.
    """
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    # Layers that carry a state, or convolve, compute flat batches with functions of this project.
    recurrent = bool(others) or model._is_stateful
    supported = recurrent and install(model)
    if supported:
        others -= {"linear_attention", "conv", "hybrid", "moe", "mlp"}

    reasons = {
        "its attention implementation cannot be replaced in transformers": (
            not model.get_decoder()._supports_attention_backend and not supported
        ),
        "it carries a recurrent state that flat batches do not support": (
            model._is_stateful and not supported
        ),
        f"it has layers of type {', '.join(sorted(others))}": bool(others),
        "its attention is bidirectional": getattr(config, "use_bidirectional_attention", None),
    }

    return [reason for reason, holds in reasons.items() if holds]


@cache
def _check_object(file: Path, modified: int) -> None:
    """Raise an error for a file that holds no JSON object; a version of it is read only once."""
    json.loads(file.read_bytes()).keys()


def _checked(section: ModelSection, flag: str, name: str) -> tuple[str, str]:
    """Return the expanded folder, or the hub name, and the flag with its value for messages.

    Raise ValueError for a folder that is missing, holds no model or has a broken file, and for a
    hub name that cannot be read.
    """
    name = name or getattr(section, flag)
    source = f"--{flag} {name}"
    folder = Path(name).expanduser()
    if is_adapter_folder(folder):
        raise ValueError(
            f"{source}: the folder contains an adapter but no model: `lightrft export {name}"
            " FOLDER` merges it into its base model"
        )
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(
            f"{source}: the folder has no config.json, so it is not a Hugging Face model"
        )
    for file in filter(Path.is_file, map(folder.joinpath, JSON_FILES)):
        try:
            _check_object(file, file.stat().st_mtime_ns)
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{source}: {file.name} cannot be read as JSON: {error}") from error
    # No name on the hub looks like this, so the hub is not asked.
    if not folder.exists() and (name.count("/") > 1 or name.startswith((".", "/", "~"))):
        raise ValueError(
            f"{source}: neither an existing folder nor a hub name (owner/name, or a single name"
            " such as gpt2)"
        )

    if not folder.exists():
        try:
            weight_files.hub_folder(name)
        except OSError as error:
            raise ValueError(
                f"{source}: neither an existing folder nor a hub name that can be loaded: {error}"
            ) from error

    return str(folder), source


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of every transformers model inside `module`, as the models name them."""
    names = {
        name
        for submodule in module.modules()
        if isinstance(submodule, PreTrainedModel)
        for name in submodule._no_split_modules or ()
    }
    return [submodule for submodule in module.modules() if type(submodule).__name__ in names]
