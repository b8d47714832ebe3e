"""The safetensors files of a Hugging Face folder: which tensors they hold, and any part of one."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

NAME, INDEX = "model.safetensors", "model.safetensors.index.json"
SAMPLES, SAMPLE_BYTES = 4, 1024
"""Of each tensor so many stretches, of so many bytes, are in a fingerprint."""


NOT_THE_MODEL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}
"""Entries of a model's configuration that differ between folders of one model."""
INTEGERS = {"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL"}
WEIGHTS = ("weight", "bias", "_proj")
"""Ends of the names of what is no buffer."""


class WeightFiles:
    """One file, or several with an index."""

    def __init__(self, files: dict[str, Path]):
        self.files = files
        """Tensor name -> the file that holds it."""

    @classmethod
    def of(cls, folder: Path | str) -> Self | None:
        """Return None for a folder without safetensors files. ValueError names a file that is missing or damaged."""
        folder = Path(folder)
        if (folder / INDEX).is_file():
            try:
                weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"]
                return cls({name: folder / file for name, file in weight_map.items()})
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(f"{folder / INDEX} is no index of safetensors files ({reason})") from error
        if (folder / NAME).is_file():
            with _opened(folder / NAME) as file:
                return cls(dict.fromkeys(file.keys(), folder / NAME))
        return None

    def check(self, *, quantized: bool) -> None:
        """ValueError for a file that is missing or damaged, and for weights that are integers where none are `quantized`.

        Headers alone are read.
        """
        for path in sorted(set(self.files.values())):
            with _opened(path) as file:
                absent = {name for name, other in self.files.items() if other == path}.difference(file.keys())
                if absent:
                    raise ValueError(f"{path} lacks {len(absent)} tensors that {INDEX} says it has, the first is {min(absent)}")
                for name in file.keys():
                    dtype = file.get_slice(name).get_dtype()
                    if not quantized and name.endswith(WEIGHTS) and dtype in INTEGERS:
                        raise ValueError(
                            f"{path}: {name} is of dtype {dtype}: the weights are quantized, and config.json does not say how; "
                            "take the model before it was quantized"
                        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors; from the headers, each of which is read once."""
        found = {}
        for path in sorted(set(self.files.values())):
            with _opened(path) as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        return found

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """This part of a tensor, on the host. Nothing else is read, and the file is mapped no longer than that."""
        with _opened(self.files[name]) as file:
            return file.get_slice(name)[part] if part else file.get_tensor(name)

    def read_all(self, names: list[str]) -> list[Tensor]:
        """Return whole tensors, of one dim at least, on the host. Each file is opened once."""
        found = {}
        for path in dict.fromkeys(self.files[name] for name in names):
            with _opened(path) as file:
                found |= {name: file.get_slice(name)[:] for name in names if self.files[name] == path}
        return [found[name] for name in names]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. ValueError names one that is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} {_damage(path, error)}") from error


def _damage(path: Path, error: Exception) -> str:
    if not path.is_file():
        return f"is not there, and {INDEX} names it"
    if path.stat().st_size == 0:
        return "is empty: 0 bytes"
    with open(path, "rb") as file:
        if file.read(32).startswith(b"version https://git-lfs"):
            return "is a pointer to a file of git-lfs and holds no weights: git lfs pull fetches them"
    return f"is damaged, or not all of it is there: {path.stat().st_size} bytes ({error}); download or copy it again"


def check_finite(name: str, weights: Tensor) -> None:
    """ValueError for weights among which there is NaN or an infinite one; no copy of them is made.

    Numbers of one byte are those of a quantized model, which scales them.
    """
    if weights.dtype.itemsize > 1 and not torch.isfinite(weights.sum(dtype=torch.float32)) and not torch.isfinite(weights).all():
        raise ValueError(f"{name} has values that are not finite")


def fingerprint(folder: Path | str) -> str:
    """Return a hash of names, shapes and dtypes of all tensors in a folder, and of some bytes of each; empty without safetensors.

    It tells apart what training has made of a model, at the cost of reading some MB. It is not a proof against intent.
    """
    files = WeightFiles.of(folder)
    found = hashlib.sha256()
    for path in sorted(set(files.files.values())) if files else ():
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))
            header.pop("__metadata__", None)
            for name, entry in sorted(header.items()):
                begin, end = entry["data_offsets"]
                found.update(f"{name} {entry['dtype']} {entry['shape']}".encode())
                for part in range(SAMPLES):
                    file.seek(start + begin + max(0, end - begin - SAMPLE_BYTES) * part // (SAMPLES - 1))
                    found.update(file.read(min(SAMPLE_BYTES, end - begin)))
    return found.hexdigest()[:16] if files else ""


def weights_of(name: str) -> str:
    """Return the fingerprint of a model's folder, or of the hub's files on this machine; empty where they cannot be read."""
    folder = Path(name).expanduser()
    try:
        if name and not folder.is_dir():
            folder = Path(try_to_load_from_cache(name, "config.json") or "").parent
        return fingerprint(folder) if name else ""
    except (OSError, ValueError, TypeError):
        return ""


def tied_names(model: PreTrainedModel) -> list[list[str]]:
    """The names of all that a folder of `model` holds, parameters and persistent buffers; those of one tensor together."""
    together: dict[int, list[str]] = defaultdict(list)
    for name, tensor in stored_tensors(model).items():
        together[id(tensor)].append(name)
    return list(together.values())


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers by the names that they have in a folder, where layers know no adapters beside them."""
    return {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict(keep_vars=True).items()}


def missing_and_unexpected(model: PreTrainedModel, stored: Iterable[str]) -> tuple[set[str], set[str]]:
    """Names of `model` that are not stored, of tied ones none, and stored names that it does not know, nor may ignore."""
    stored, groups = set(stored), tied_names(model)
    missing = {group[0] for group in groups if stored.isdisjoint(group)}
    ignored = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or ()) or "$^")
    return missing, {name for name in stored.difference(*groups) if not ignored.search(name)}


def is_backbone(model: PreTrainedModel, name: str) -> bool:
    """Whether a parameter is below the head."""
    return name.startswith(f"{model.base_model_prefix}.")
