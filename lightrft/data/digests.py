"""Digests of data: to compare the data of two runs, and to name cached files."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import PreTrainedTokenizerFast

import lightrft
from lightrft.config.sections import DataSection
from lightrft.core.samples import TokenIds
from lightrft.data.loader import share_of
from lightrft.data.media_files import MediaFile
from lightrft.versions import installed_version

NUM_PIECES = 64
"""Number of pieces of the data with a digest each, so that a change can be located."""
DATA_SET_FIELDS = {
    *"""prompt_data prompt_data_probs prompt_split eval_data eval_split pretrain_data
    pretrain_split""".split(),
    *("max_samples", "max_eval_samples", "data_cache"),
}
"""Fields that do not change a row."""


def digests_of_pieces(rows: Sequence[Any]) -> list[str]:
    """Return the digest of each of NUM_PIECES consecutive pieces of the rows."""
    pieces = [share_of(number, NUM_PIECES, len(rows)) for number in range(NUM_PIECES)]
    return [digest(rows[row] for row in piece) for piece in pieces]


def digest(rows: Iterable[Any]) -> str:
    """Return a digest of dataclass rows; it is the same in every process.

    It covers the fields that equality compares.
    """
    hasher = hashlib.sha256()
    for row in rows:
        values = [getattr(row, field.name) for field in fields(row) if field.compare]
        hasher.update(json.dumps(values, sort_keys=True, default=_stable).encode())
    return hasher.hexdigest()[:16]


def cache_key(
    section: DataSection,
    names: list[str],
    split: str,
    limit: int | None,
    tokenizer: Tokenizer,
    others: Any,
) -> str:
    """Return a digest of everything that tokenized data depend on.

    That is the files with times, tokenizer, fields, versions, and `others`.
    """
    options = {
        name: value for name, value in asdict(section).items() if name not in DATA_SET_FIELDS
    }
    # Another version may render, tokenize or generate rows differently.
    versions = [lightrft.__version__, installed_version("reasoning-gym")]
    states = [*map(_state, names)], _state_of_tokenizer(tokenizer)
    content = json.dumps(
        [*states, split, limit, options, versions, others], sort_keys=True, default=str
    )
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _state(name: str) -> Any:
    """Return the name of a data set with sizes and times of the files.

    For an object of Python it has the size and time of the program.
    """
    path = Path(name).expanduser()
    if not path.exists() and ":" in name:
        module = name.rpartition(":")[0]
        path = Path(module).expanduser()
        with suppress(ImportError, ValueError):
            spec = None if module.endswith(".py") else find_spec(module)
            path = Path(spec.origin) if spec and spec.origin else path

    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        files = [path] if path.is_file() else []
    return [
        name,
        [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    ]


def _state_of_tokenizer(tokenizer: Tokenizer) -> Any:
    fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    rules = tokenizer.backend_tokenizer.to_str() if fast else sorted(tokenizer.get_vocab().items())
    return [type(tokenizer).__name__, rules, tokenizer.chat_template, tokenizer.special_tokens_map]


def _stable(value: Any) -> Any:
    """Convert what JSON cannot.

    Token ids and bytes are converted by content, others by type, as a repr may contain an address.
    """
    if isinstance(value, TokenIds):
        return value.tolist()
    if isinstance(value, MediaFile):
        return json.dumps(
            [value.name, "" if isinstance(value.source, Path) else value.source], default=_stable
        )
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else type(value).__name__
