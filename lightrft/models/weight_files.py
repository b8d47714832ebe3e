"""Safetensors files of a Hugging Face folder: their tensors, and any slice of a tensor."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url, try_to_load_from_cache
from loguru import logger
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

WEIGHTS_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FINGERPRINT_RANGES = 4
FINGERPRINT_BYTES = 1024
"""How many byte ranges of each tensor enter a fingerprint, and how long each range is in bytes."""
ASK_SECONDS = 5
"""How long a question to the hub may take."""


NOT_THE_MODEL = set(
    "_name_or_path transformers_version dtype torch_dtype use_cache architectures".split()
)
"""Entries of a model's configuration that may differ between folders of the same model."""
INTEGERS = {"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL"}
WEIGHT_ENDINGS = ("weight", "bias", "_proj")
"""Name endings of tensors that are weights, not buffers."""
MASK = re.compile(r"(attn|attention)\.(masked_)?bias$")
"""Names of causal masks. Earlier versions of transformers wrote them beside the weights of GPT-2,
GPT-Neo, GPT-NeoX, GPT-J and their relatives."""


class WeightFiles:
    """Safetensors files of one folder: a single file, or several with an index."""

    def __init__(self, files: dict[str, Path]):
        self.files = files
        """Tensor name -> file that holds it."""

    @classmethod
    def of(cls, folder: Path | str) -> Self | None:
        """Return the files of a folder; None for a folder without safetensors files.

        Raise ValueError, with the name of the file, if it is missing or damaged.
        """
        folder = Path(folder)
        listed: dict[str, Path] = {}
        if (folder / INDEX).is_file():
            try:
                weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"]
                listed = {name: folder / file for name, file in weight_map.items()}
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(
                    f"{folder / INDEX} is not an index of safetensors files ({reason})"
                ) from error

        elif not (folder / WEIGHTS_FILE).is_file():
            return None

        # An index may lack tensors that its files have: transformers reads the files.
        for path in sorted({*listed.values()} or {folder / WEIGHTS_FILE}):
            with _open(path) as file:
                listed = dict.fromkeys(file.keys(), path) | listed
        return cls(listed)

    def check(self) -> None:
        """Raise ValueError for a missing or damaged file, and for integer weights.

        Only headers are read.
        """
        for path in sorted(set(self.files.values())):
            with _open(path) as file:
                absent = {name for name, other in self.files.items() if other == path}.difference(
                    file.keys()
                )
                if absent:
                    raise ValueError(
                        f"{path} lacks {len(absent)} tensors that {INDEX} lists for it, the first"
                        f" is {min(absent)}"
                    )

                for name in file.keys():
                    dtype = file.get_slice(name).get_dtype()
                    is_weight = name.endswith(WEIGHT_ENDINGS) and not MASK.search(name)
                    if is_weight and dtype in INTEGERS:
                        raise ValueError(
                            f"{path}: {name} is of dtype {dtype}: the weights are quantized, but"
                            " config.json has no quantization settings; use the unquantized model"
                        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors. Only headers are read, each once."""
        return {name: tuple(piece.get_shape()) for name, piece in self._slices()}

    def dtypes(self) -> dict[str, str]:
        """Return the dtypes of all tensors, as safetensors names them."""
        return {name: piece.get_dtype() for name, piece in self._slices()}

    def _slices(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and safetensors' slice of each tensor; the slice is read in this turn."""
        for path in sorted(set(self.files.values())):
            with _open(path) as file:
                yield from ((name, file.get_slice(name)) for name in file.keys())

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """Return `slices` of a tensor, on the host.

        Nothing else is read, and the file is mapped only during the call.
        """
        with _open(self.files[name]) as file:
            return file.get_slice(name)[slices] if slices else file.get_tensor(name)

    def read_all(self, names: list[str]) -> list[Tensor]:
        """Return whole tensors of at least one dimension, on the host. Each file is opened once."""
        tensors = {}
        for path in dict.fromkeys(self.files[name] for name in names):
            with _open(path) as file:
                tensors |= {
                    name: file.get_slice(name)[:] for name in names if self.files[name] == path
                }
        return [tensors[name] for name in names]


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a safetensors file. If it is missing or damaged, raise a ValueError that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} {_damage(path, error)}") from error


def _damage(path: Path, error: Exception) -> str:
    if not path.is_file():
        return f"does not exist, but {INDEX} lists it"
    if path.stat().st_size == 0:
        return "is empty: 0 bytes"

    with open(path, "rb") as file:
        if file.read(32).startswith(b"version https://git-lfs"):
            return "is a git-lfs pointer without weights: download them with git lfs pull"

    return (
        f"is damaged or incomplete: {path.stat().st_size} bytes ({error}); download or copy it"
        " again"
    )


def check_finite(name: str, weights: Tensor) -> None:
    """Raise ValueError for weights with NaN or infinite values, without copying them."""
    if not torch.isfinite(weights.sum()) and not torch.isfinite(weights).all():
        raise ValueError(f"{name} has values that are not finite")


def fingerprint(folder: Path | str) -> str:
    """Return a hash of names, shapes, dtypes and some bytes of all tensors in a folder.

    It is empty without safetensors files. It distinguishes the versions of a model during training
    at the cost of reading a few MB, and does not protect against deliberate manipulation.
    """
    files = WeightFiles.of(folder)
    hasher = hashlib.sha256()
    for path in sorted(set(files.files.values())) if files else ():
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))
            # Metadata may differ between files with the same weights.
            header.pop("__metadata__", None)
            for name, entry in sorted(header.items()):
                begin, end = entry["data_offsets"]
                hasher.update(f"{name} {entry['dtype']} {entry['shape']}".encode())
                for step in range(FINGERPRINT_RANGES):
                    file.seek(
                        start
                        + begin
                        + max(0, end - begin - FINGERPRINT_BYTES) * step // (FINGERPRINT_RANGES - 1)
                    )
                    hasher.update(file.read(min(FINGERPRINT_BYTES, end - begin)))

    return hasher.hexdigest()[:16] if files else ""


def weights_of(name: str) -> str:
    """Return the fingerprint of a model given by folder or hub name; empty if it cannot be read.

    Of a hub name only files in the local cache are read.
    """
    try:
        folder = cached_folder(name)
        return fingerprint(folder) if folder else ""
    except (OSError, ValueError, TypeError):
        return ""


def cached_folder(name: str) -> Path | None:
    """Return a model's folder, or where the local hub cache has the files; None without either."""
    folder = Path(name).expanduser()
    if not name or folder.is_dir():
        return folder if name else None
    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def hub_folder(name: str) -> Path:
    """Return a model's folder, or where the hub's files are in the cache, after one short question.

    Raise OSError if the hub has no such model, or does not answer.
    """
    if folder := cached_folder(name):
        return folder
    logger.info("asking the hub for {}, at most {} s", name, ASK_SECONDS)
    url = hf_hub_url(name, "config.json")
    try:
        # cached_file() alone would go on asking for half a minute.
        get_hf_file_metadata(url, token=get_token(), timeout=ASK_SECONDS)
        return Path(cached_file(name, "config.json")).parent
    except Exception as error:  # of the HTTP client, whose errors have no class in common
        raise OSError(f"{type(error).__name__}: {error} (no network? name a folder)") from error


def tied_names(model: PreTrainedModel) -> list[list[str]]:
    """Return the names of all parameters and persistent buffers of `model`, grouped by tensor.

    Tied names form one group.
    """
    together: dict[int, list[str]] = defaultdict(list)
    for name, tensor in stored_tensors(model).items():
        together[id(tensor)].append(name)
    return list(together.values())


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by the names that a folder has for them.

    These are the names without adapters.
    """
    tensors = model.state_dict(keep_vars=True).items()
    return {name.replace(".base_layer.", "."): tensor for name, tensor in tensors}


def missing_and_unexpected(
    model: PreTrainedModel, stored: Iterable[str]
) -> tuple[set[str], set[str]]:
    """Compare the names of `model` with the `stored` names.

    Return the names that are not stored, and the stored names that the model neither has nor may
    ignore. Tied names are missing only if none of them is stored; the first of them is returned.
    """
    stored = set(stored)
    groups = tied_names(model)
    missing = {group[0] for group in groups if stored.isdisjoint(group)}
    patterns = [MASK.pattern, *(model._keys_to_ignore_on_load_unexpected or ())]
    ignored = re.compile("|".join(patterns))
    return missing, {name for name in stored.difference(*groups) if not ignored.search(name)}


def refuse_tensors(names: Collection[str], problem: str, hint: str = "") -> None:
    """Raise ValueError if there are any tensors with this problem."""
    if names:
        raise ValueError(f"{len(names)} tensors {problem}, the first is {min(names)}{hint}")


def is_backbone(model: PreTrainedModel, name: str) -> bool:
    """Return True if a parameter belongs to the backbone, not to the head."""
    return name.startswith(f"{model.base_model_prefix}.")
