"""Let Python objects stand where the configuration holds names.

Each object gets a name that this process can look up.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, PreTrainedModel, ProcessorMixin
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.config.errors import ConfigError
from lightrft.config.values import import_path
from lightrft.registry import OBJECTS
from lightrft.strategy.checkpoint.hf_export import export_whole
from lightrft.strategy.checkpoint.model_folders import converted_folder

DATA = ("prompt_data", "eval_data", "pretrain_data")
"""Values that may be rows."""
FUNCTIONS = ("reward", "advantage_estimator", "policy_loss", "rollout_correction")
"""Values that may be functions that no other process can import. They are called in this one."""
OF_TOKENIZER = tuple(
    "tokenizer vocab merges special_tokens_map added_tokens chat_template spiece sentencepiece".split()
)
"""What the names of a tokenizer's files begin with."""


def with_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace rows, and functions that are defined inside others, by names."""
    named = dict(values)
    for field in set(named) & {*DATA, *FUNCTIONS}:
        value = named[field]
        if field in DATA and _are_rows(value):
            named[field] = _name(field, value)
        elif field in DATA and not isinstance(value, str | os.PathLike | list | tuple):
            raise ConfigError(
                f"{field} is a list of rows, a Dataset, a file or a hub name, not"
                f" {type(value).__name__}"
            )
        elif isinstance(value, list | tuple):
            named[field] = [_name_of_function(each) for each in value]
        else:
            named[field] = _name_of_function(value)

    return named


def _are_rows(value: Any) -> bool:
    from datasets import Dataset, DatasetDict, IterableDataset

    if isinstance(value, DatasetDict):
        raise ConfigError(
            "a DatasetDict has several splits: pass one of them, such as"
            f" data[{next(iter(value), 'train')!r}]"
        )
    if isinstance(value, list | tuple):
        return any(isinstance(row, Mapping) for row in value)
    return isinstance(value, Dataset | IterableDataset)


def _name_of_function(value: Any) -> Any:
    if not callable(value) or import_path(value):
        return value
    return _name(getattr(value, "__name__", type(value).__name__), value)


def _name(wanted: str, value: Any) -> str:
    """Return `module:attribute` for an object, the same name each time."""
    names = vars(OBJECTS)
    attribute = next((name for name, each in names.items() if each is value), None)
    if attribute is None:
        attribute = wanted = re.sub(r"\W", "", wanted) or "object"
        number = 2
        while attribute in names:
            attribute = f"{wanted}{number}"
            number = number + 1
        setattr(OBJECTS, attribute, value)
    return f"{OBJECTS.__name__}:{attribute}"


@contextmanager
def model_folder(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Write `model` and `tokenizer` objects to a temporary folder; put the name into `values`.

    Without such objects the values stay as they are. `model` is another name for `pretrain`.
    """
    named = dict(values)
    tokenizer = named.pop("tokenizer", None)
    if "model" in named:
        if "pretrain" in named:
            raise ConfigError("model and pretrain are two names of one value: set only one")
        named["pretrain"] = named.pop("model")

    model = named.get("pretrain")
    if tokenizer is None and isinstance(model, str | os.PathLike | None):
        yield named
        return

    _check(named, model, tokenizer)
    folder = Path(tempfile.mkdtemp(prefix="lightrft-model-"))
    try:
        _write(folder, model, tokenizer)
        yield named | {"pretrain": str(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(values: Mapping[str, Any], model: Any, tokenizer: Any) -> None:
    # Under a launcher each process would write another folder, and no two ranks would agree.
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(
            "a model or tokenizer object is for a run of one process: save it, and pass the name of"
            " its folder"
        )
    if values.get("save_adapter_only"):
        raise ConfigError(
            "save_adapter_only refers to the folder of the base model: save the model object, and"
            " pass its folder"
        )

    if tokenizer is not None and not isinstance(tokenizer, Tokenizer | ProcessorMixin):
        raise ConfigError(
            f"tokenizer is a tokenizer or processor of transformers, not {type(tokenizer).__name__}"
        )

    if not isinstance(model, PreTrainedModel | str | os.PathLike) or not model:
        raise ConfigError(
            f"model is a model of transformers, a folder or a hub name, not {type(model).__name__}"
        )
    if isinstance(model, PreTrainedModel) and tokenizer is None and not model.name_or_path:
        raise ConfigError("the model object does not say where its tokenizer is: pass tokenizer=")


def _write(folder: Path, model: Any, tokenizer: Any) -> None:
    if isinstance(model, PreTrainedModel):
        dtypes = {parameter.dtype for parameter in model.parameters()}
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(model.name_or_path)
        export_whole(model, tokenizer, folder, dtypes.pop() if len(dtypes) == 1 else torch.float32)
    else:
        source = Path(converted_folder(str(model), "model")).expanduser()
        source = source if source.is_dir() else Path(snapshot_download(str(model)))
        # The model's files are linked, not copied: only the tokenizer is another one.
        for file in source.iterdir():
            if not file.name.startswith(OF_TOKENIZER):
                (folder / file.name).symlink_to(file.resolve())

    tokenizer.save_pretrained(folder)
