"""Read the rows of a data set from files or the hub, each with the location.

Bad rows are handled here, too.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger
from pyarrow import ArrowException, ArrowInvalid, Table

from lightrft.config.errors import DataError
from lightrft.config.references import DATA_FILES, HARBOR, REASONING_GYM, VERIFIERS
from lightrft.data.columns.values import DataRow, table_rows
from lightrft.registry import Registry, all_kept_alive, kept_alive

# importing datasets takes longer than reading most files, and JSON does not need it
if TYPE_CHECKING:
    from datasets import Dataset

HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+(?<!\.py))(?::(?P<subset>[^:/]+))?")
"""A data set on the hub, owner/name or owner/name:SUBSET."""
SAVED = ("state.json", "dataset_dict.json")
"""Files that show a folder to be one of Dataset.save_to_disk."""
ROWS_AT_ONCE = 64
NUMBERED = r"([-_. ]?(part|shard)?[-_. ]?\d+([-_. ]?of[-_. ]?(?P<parts>\d+))?(-[0-9a-f]{16})?)?"
"""Number of a shard of a split in the name of a file, such as -00000-of-00002 after train."""
SPLITS = set("train training val valid validation dev test eval evaluation".split())
"""What splits are usually called."""


def is_first_rank() -> bool:
    """Return True on the rank that logs what all ranks find alike."""
    return int(os.environ.get("RANK", 0)) == 0


@dataclass
class BadRows:
    """Collection of bad rows; the first one raises DataError unless `skip` is set."""

    skip: bool
    flag: str
    """Flag that names the data, for messages."""
    reasons: list[str] = field(default_factory=list)

    def add(self, where: str, reason: str) -> None:
        message = f"{self.flag}: {where}: {reason}"
        if not self.skip:
            raise DataError(
                f"{message}. Correct the row or the flags, or pass --bad_rows skip to skip such"
                " rows"
            )
        self.reasons.append(message)

    def report(self) -> None:
        if self.reasons and is_first_rank():
            shown = "\n".join(f"  {reason}" for reason in self.reasons[:5])
            logger.warning(
                f"{len(self.reasons)} bad rows of {self.flag} skipped, the first:\n{shown}"
            )


def read_rows(source: str, split: str, bad: BadRows) -> Iterator[DataRow]:
    """Yield the rows of a data set.

    It is a file, a folder of files, a folder that `Dataset.save_to_disk` wrote, a name on the hub,
    with the name of a subset or without, a task of reasoning-gym, an environment of verifiers, or
    an object of Python, as module:object or file.py:object. In a folder of files, the files of the
    split are read, or the only file. Raise DataError for a source that does not exist or cannot be
    read.
    """
    path = Path(source).expanduser()
    if source.startswith(REASONING_GYM):
        from lightrft.data.reasoning_gym.tasks import task_rows

        yield from task_rows(source, split, bad.flag)
    elif source.startswith(VERIFIERS):
        from lightrft.data.verifiers.tasksets import task_rows as verifiers_rows

        yield from verifiers_rows(source, bad.flag)
    elif source.startswith(HARBOR):
        yield from _harbor_rows(source, bad.flag)
    elif files := files_of(source, split, bad.flag):
        for file in files:
            yield from _file_rows(file, bad)
    elif path.is_dir():
        yield from _saved_rows(path, split, bad.flag)
    # A missing file is reported as such, and not looked up on the hub.
    elif path.suffix not in DATA_FILES and (on_hub := HUB.fullmatch(source)):
        yield from _hub_rows(on_hub["name"], on_hub["subset"], split, bad.flag)
    elif ":" in source:
        yield from _object_rows(source, split, bad)
    else:
        raise DataError(
            f"{bad.flag} {source}: neither an existing file or folder nor a hub name (owner/name)"
        )


def _harbor_rows(source: str, flag: str) -> Iterator[DataRow]:
    """Yield a row for each task of a folder: what it asks for, and where it is."""
    folder = Path(source.removeprefix(HARBOR)).expanduser()
    tasks = sorted(file.parent for file in folder.glob("*/task.toml"))
    if not tasks:
        raise DataError(f"{flag} {source}: no task of Harbor, {folder.resolve()}/*/task.toml")
    for task in tasks:
        text = (task / "instruction.md").read_text(encoding="utf-8")
        yield f"{source} {task.name}", {"input": text, "task": str(task.resolve())}


def _saved_rows(folder: Path, split: str, flag: str) -> Iterator[DataRow]:
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, ArrowInvalid) as error:
        raise DataError(
            f"{flag} {folder}: it cannot be read as a folder of Dataset.save_to_disk ({error})"
        ) from error
    if isinstance(dataset, DatasetDict):
        dataset = _split_of(dataset, split, f"{flag} {folder}")
    yield from _numbered(f"{folder}[{split}]", dataset)


def _split_of(splits: Mapping[str, Any], split: str, where: str) -> Any:
    if split not in splits:
        raise DataError(
            f"{where}: there is no split {split!r}; the data set has {', '.join(map(str, splits))}"
        )
    return splits[split]


def _hub_rows(name: str, subset: str | None, split: str, flag: str) -> Iterator[DataRow]:
    from datasets import load_dataset

    source = f"{name}:{subset}" if subset else name
    try:
        dataset = load_dataset(name, subset, split=split)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{flag} {source}: the hub's data set cannot be loaded: {str(error).splitlines()[0]}"
        ) from error
    yield from _numbered(f"{source}[{split}]", dataset)


def _numbered(name: str, dataset: "Dataset") -> Iterator[DataRow]:
    return ((f"{name} row {number}", row) for number, row in enumerate(_stored(dataset), 1))


def _object_rows(reference: str, split: str, bad: BadRows) -> Iterator[DataRow]:
    """Yield the rows of an iterable, or of a function that returns one.

    A function with a parameter `split` gets the split.
    """
    from datasets import Dataset, IterableDataset

    try:
        data = Registry("data set", flag=bad.flag)[reference]
    except ValueError as error:
        raise DataError(str(error)) from error
    number = 0
    try:
        with kept_alive():
            if callable(data):
                data = data(**({"split": split} if "split" in signature(data).parameters else {}))
        if isinstance(data, Mapping):
            data = _split_of(data, split, f"{bad.flag} {reference}")
        if isinstance(data, IterableDataset):
            data = data.with_format(None)
        rows = _stored(data) if isinstance(data, Dataset) else data
        for number, row in enumerate(all_kept_alive(rows), 1):
            yield from _object(f"{reference} row {number}", row, bad)
    except DataError:
        raise
    except Exception as error:  # of the user's own code
        where = f"after row {number}" if number else "before the first row"
        raise DataError(
            f"{bad.flag} {reference}: {where}: {type(error).__name__}: {error}"
        ) from error


def files_of(source: str, split: str, flag: str) -> list[Path]:
    """Return the files of a split; none for data that are not files of rows.

    Raise DataError for a folder without one.
    """
    folder = Path(source).expanduser()
    if folder.is_file():
        return [folder]
    if not folder.is_dir() or any((folder / name).exists() for name in SAVED):
        return []

    files = sorted(file for file in folder.iterdir() if file.suffix in DATA_FILES)
    if not files:
        inner = sorted({one.parent.name for one in folder.glob("*/*") if one.suffix in DATA_FILES})
        hint = f"; its folders {', '.join(inner[:5])} do: give one of these" if inner else ""
        raise DataError(
            f"{flag} {folder}: the folder contains no {', '.join(DATA_FILES)} file{hint}"
        )

    matches = [re.fullmatch(re.escape(split) + NUMBERED, file.stem) for file in files]
    of_split = [file for file, match in zip(files, matches, strict=True) if match]
    others = [file for file in files if file not in of_split]
    names = ", ".join(file.name for file in others[:5])
    words = set(re.split(r"[^a-z]+", files[0].stem.lower()))
    if not of_split and (len(files) > 1 or split.lower() not in words and words & SPLITS):
        raise DataError(
            f"{flag} {folder}: no file is called {split!r}, with or without the number of a part;"
            f" the folder contains {names}. Give a file, or the name of another split"
        )

    read = ", ".join(file.name for file in of_split[:5])
    totals = Counter(match["parts"] for match in matches if match)
    whole = all(found == int(total or found) for total, found in totals.items())
    if not whole or len({file.suffix for file in of_split}) > 1:
        raise DataError(
            f"{flag} {folder}: parts of the split {split!r} are missing, or there in two formats:"
            f" {read}. Add the others, or give a file"
        )
    if of_split and any(file.name.startswith(split) for file in others) and is_first_rank():
        logger.warning(f"{flag} {folder}: the split {split!r} is {read}; not read are {names}")

    return of_split or files


def _file_rows(file: Path, bad: BadRows) -> Iterator[DataRow]:
    if file.suffix not in DATA_FILES:
        raise DataError(
            f"{bad.flag} {file}: unknown file type; supported are {', '.join(DATA_FILES)}"
        )
    rows_of = {".jsonl": _json_lines, ".json": _json_list, ".parquet": _parquet_rows}
    try:
        yield from rows_of[file.suffix](file, bad)
    except OSError as error:  # a link to nothing, a folder, no permission
        raise DataError(f"{bad.flag} {file}: {error.strerror}") from error


def _parquet_rows(file: Path, bad: BadRows) -> Iterator[DataRow]:
    from pyarrow.parquet import ParquetFile

    number = 0
    named = f"{bad.flag} {file}"
    try:
        with ParquetFile(file) as parquet:
            for name, times in Counter(parquet.schema_arrow.names).items():
                if times > 1:
                    raise DataError(f"{named}: {times} columns are called {name!r}; rename them")
            for batch in parquet.iter_batches(ROWS_AT_ONCE):
                for row in table_rows(Table.from_batches([batch])):
                    number += 1
                    yield f"{file} row {number}", row
    except (ArrowException, OSError) as error:
        where = f" after row {number}" if number else ""
        raise DataError(f"{named}: not a valid parquet file{where} ({error})") from error


def _stored(rows: "Dataset") -> Iterator[dict[str, Any]]:
    """Yield rows as they are stored, or as the data set's own transform makes them.

    Stored images stay encoded files, much smaller than the pixels. Columns that its format leaves
    out are left out here.
    """
    form = rows.format
    if form["type"] == "custom":
        yield from rows
        return

    names = None if form["output_all_columns"] else form["columns"]
    for table in rows.with_format("arrow", columns=names).iter(ROWS_AT_ONCE):
        yield from table_rows(table)


def _json_lines(file: Path, bad: BadRows) -> Iterator[DataRow]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = _parsed(line)
            except ValueError as error:  # malformed JSON, or bytes that are not valid UTF-8
                bad.add(where, f"not valid JSON ({error})")
                continue
            yield from _object(where, row, bad)


def _parsed(text: bytes) -> Any:
    """Parse a JSON value.

    Raise ValueError for invalid JSON, too deep nesting, and a key that an object has twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_object_of)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deep") from error


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON.

    Parsers disagree about a key that comes twice, so it is an error.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {name!r:.100} twice")
    return found


def _json_list(file: Path, bad: BadRows) -> Iterator[DataRow]:
    try:
        rows = _parsed(file.read_bytes())
    except ValueError as error:
        raise DataError(
            f"{bad.flag} {file}: not valid JSON ({error}); one object per line belongs in a .jsonl"
            " file"
        ) from error

    if not isinstance(rows, list):
        raise DataError(f"{bad.flag} {file}: not a JSON list of objects but {type(rows).__name__}")
    for index, row in enumerate(rows):
        yield from _object(f"{file} row {index + 1}", row, bad)


def _object(where: str, row: Any, bad: BadRows) -> Iterator[DataRow]:
    if isinstance(row, dict):
        yield where, row
    else:
        bad.add(where, f"not a JSON object but {type(row).__name__}")
