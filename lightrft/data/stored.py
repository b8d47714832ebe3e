"""Prompts in an Arrow file that is mapped into memory.

It is for data that are larger than memory or slow to tokenize. One process of a machine writes the
file, under another name until it is complete, while the others wait for the lock. It has Arrow's
stream format, so `datasets.Dataset.from_file` opens it too.
"""

import fcntl
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from loguru import logger

from lightrft.config.errors import DataError
from lightrft.core.samples import Answer, Prompt, TokenIds
from lightrft.data import media_files
from lightrft.data.digests import digests_of_pieces
from lightrft.data.readers import is_first_rank

ANSWER_STRUCT = pa.struct(
    {"name": pa.string(), "token_ids": pa.list_(pa.int32()), "learned": pa.list_(pa.bool_())}
)
MEDIUM_STRUCT = pa.struct(
    {
        "medium": pa.string(),
        "name": pa.string(),
        "path": pa.string(),
        "content": pa.large_binary(),
        "fps": pa.float64(),
        "most": pa.int32(),
    }
)
SCHEMA = pa.schema(
    {
        "text": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "columns": pa.string(),
        "answers": pa.list_(ANSWER_STRUCT),
        "media": pa.list_(MEDIUM_STRUCT),
        "media_tokens": pa.int32(),
        "location": pa.string(),
    }
)
"""Columns of the file. `columns` is a JSON object of the row's columns that are no Answer."""
MEDIA_CLASSES = {
    media_files.IMAGES: media_files.ImageFile,
    media_files.VIDEOS: media_files.VideoFile,
    media_files.AUDIOS: media_files.AudioFile,
}
ROWS_OF_BATCH = 1024
"""Number of rows in each record batch except the last."""


class StoredPrompts(Sequence[Prompt]):
    """Rows `rows` of a file; a Prompt is built each time it is needed. A slice is a list."""

    def __init__(self, file: Path, rows: range, examples: Sequence[int] = ()):
        """Open the file. `examples` are rows of each kind, of this and other sets."""
        self.rows = rows
        self._examples = examples
        self._batches = pa.ipc.open_stream(pa.memory_map(str(file))).read_all().to_batches()

    @property
    def examples(self) -> list[Prompt]:
        """Return a prompt of each kind."""
        return [self._prompt(row) for row in self._examples if row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        rows = self.rows[index]
        return list(map(self._prompt, rows)) if isinstance(rows, range) else self._prompt(rows)

    def _prompt(self, row: int) -> Prompt:
        batch = self._batches[row // ROWS_OF_BATCH]
        index = row % ROWS_OF_BATCH
        text, token_ids, columns, answers, media, media_tokens, location = (
            column[index] for column in batch.columns
        )

        values = json.loads(columns.as_py())
        for answer in answers:
            values[answer["name"].as_py()] = Answer(
                _token_ids(answer["token_ids"]), answer["learned"].as_py()
            )

        files: dict[str, list[media_files.MediaFile]] = {}
        for entry in media.as_py() or ():
            source = entry["name"], entry["content"] or Path(entry["path"])
            options = (entry["fps"], entry["most"]) if entry["medium"] == media_files.VIDEOS else ()
            file = MEDIA_CLASSES[entry["medium"]](*source, *options)
            files.setdefault(entry["medium"], []).append(file)

        size, where = media_tokens.as_py(), location.as_py()
        return Prompt(row, text.as_py(), _token_ids(token_ids), values, files, size, where)


def _token_ids(ids: pa.ListScalar) -> TokenIds:
    token_ids = TokenIds(())
    array.frombytes(token_ids, ids.values.to_numpy().tobytes())
    return token_ids


def stored_prompts(
    folder: Path, key: str, sets: Sequence[Iterable[Prompt]], *, distinguishing: str | None = None
) -> tuple[list[StoredPrompts], list[str]]:
    """Return the prompts of each set, and the digests of all, from the file of `key`.

    The file is first written if it is not there, and only then the sets are iterated.
    `distinguishing` is a column whose values make rows different in kind. Raise DataError if the
    folder cannot be written.
    """
    file = folder / f"{key}.arrow"
    facts = folder / f"{key}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock_file(folder / f"{key}.lock"):
            # Whoever gets the lock first writes, and finds no file; the others find it complete.
            if file.exists():
                if is_first_rank():
                    logger.info("{}: the tokenized data are read from this file", file)
            else:
                new = file.with_suffix(".new")
                facts.write_text(json.dumps(_write(new, sets, distinguishing)))
                new.replace(file)
        summary = json.loads(facts.read_text())
    except OSError as error:
        raise DataError(
            f"--data_cache {folder}: {error.strerror or error} ({error.filename or file})"
        ) from error

    ends = [0, *accumulate(summary["sizes"])]
    return [
        StoredPrompts(file, range(start, end), summary["examples"]) for start, end in pairwise(ends)
    ], summary["digests"]


def _write(
    file: Path, sets: Sequence[Iterable[Prompt]], distinguishing: str | None
) -> dict[str, Any]:
    """Write the prompts of all sets, and return facts that would take a pass over the rows.

    They are the sizes of the sets, the digests of pieces of all rows, and as examples the first row
    with each set of column names and value of the distinguishing column.
    """
    sizes = [0] * len(sets)
    examples = {}

    def counted() -> Iterator[Prompt]:
        for number, one in enumerate(sets):
            for prompt in one:
                kind = tuple(sorted(prompt.columns)), repr(prompt.columns.get(distinguishing))
                examples.setdefault((number, *kind), sum(sizes))
                sizes[number] += 1
                yield prompt

    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        prompts = counted()
        while batch := list(islice(prompts, ROWS_OF_BATCH)):
            rows = list(map(_row, batch))
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
    return {
        "sizes": sizes,
        "digests": digests_of_pieces(StoredPrompts(file, range(sum(sizes)))),
        "examples": sorted(examples.values()),
    }


def _row(prompt: Prompt) -> dict[str, Any]:
    """Return the columns of a prompt."""
    columns = prompt.columns.items()
    plain = {name: value for name, value in columns if not isinstance(value, Answer)}
    answers = [(name, value) for name, value in columns if isinstance(value, Answer)]
    media = [(medium, item) for medium, items in prompt.multi_modal.items() for item in items]
    return {
        "text": prompt.text,
        "token_ids": list(prompt.token_ids),
        "columns": json.dumps(plain),
        "answers": [{"name": name, **value._asdict()} for name, value in answers],
        "media": [_media(medium, item) for medium, item in media],
        "media_tokens": prompt.media_tokens,
        "location": prompt.location,
    }


def _media(medium: str, item: media_files.MediaFile) -> dict[str, Any]:
    inside = isinstance(item.source, bytes)
    file = {
        "name": item.name,
        "path": None if inside else str(item.source),
        "content": item.source if inside else None,
    }

    frames = {"fps": item.fps, "most": item.most} if isinstance(item, media_files.VideoFile) else {}
    return {"medium": medium} | file | frames


def storing_problem(prompt: Prompt) -> str | None:
    """Return the reason why a prompt cannot be stored; None if it can."""
    for items in prompt.multi_modal.values():
        for item in items:
            if isinstance(item.source, tuple):
                return (
                    f"{item.name}: --data_cache stores files, not lists of frames and no waveforms"
                )

    for name, value in prompt.columns.items():
        if isinstance(value, Answer):
            continue
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            return (
                f"the column {name!r} cannot be stored as JSON with --data_cache: {error}; convert"
                " it, or leave it out"
            )

    return None


@contextmanager
def _lock_file(file: Path) -> Iterator[None]:
    """Hold a lock among the processes that see the folder; it ends with its process in any case."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
