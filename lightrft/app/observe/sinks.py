"""Sinks for metrics and samples: the interface, and the ones that write files.

The terminal is in console.py, and trackers are in trackers.py.
"""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from loguru import logger

from lightrft.app.observe.text import is_number
from lightrft.core.samples import Episode, Sample

PROMPT_IDS = "prompt_token_ids"
RESPONSE_IDS = "response_token_ids"
THUMBNAILS = "thumbnails"
SOUNDS = "sounds"
"""Columns of samples for programs, not people: token ids, and images and sound as data URIs."""
BRANCHES = "branches"
"""Column with the other conversations of an episode, each a list of messages."""
TAIL_BYTES = 2**24
"""Bytes at the end of a long file that are read to find the last rows."""
WRITER_BACKLOG = 16
"""Most calls that wait for a writer, so that a slow disk does not fill the memory."""
Settings = dict[str, Any]
"""Sections of a run's configuration as plain values."""


class Writer:
    """A thread that makes calls one after another, such as writing files, while the caller goes on.

    It makes no more calls after one that fails. Every later submit() and flush() raises the error
    of that one.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "writer")
        self._pending: deque[Future[None]] = deque()
        self.error: Exception | None = None
        """Error of the call that failed."""

    def submit(self, call: Callable[[], None]) -> None:
        """Make a call after all earlier ones.

        Wait first while WRITER_BACKLOG calls have not been made.
        """
        while len(self._pending) >= WRITER_BACKLOG or self._pending and self._pending[0].done():
            self._pending.popleft().result()
        if self.error is not None:
            raise self.error
        self._pending.append(self._thread.submit(self._make, call))

    def wait(self) -> None:
        """Wait until all calls are made, or one has failed."""
        while self._pending:
            self._pending.popleft().result()

    def flush(self) -> None:
        """Wait until all calls are made; raise the error if one has failed."""
        self.wait()
        if self.error is not None:
            raise self.error

    def _make(self, call: Callable[[], None]) -> None:
        if self.error is None:
            try:
                call()
            except Exception as error:
                self.error = error


class Sink:
    """Base of all sinks; the methods do nothing.

    Steps count from 1; step 0 is before the first update.
    """

    in_background = False
    """True if an observer calls log() and samples() in the writer's thread."""

    def start(self, config: Settings, total_steps: int, resume_step: int | None = None) -> None:
        """Start, once, before anything else.

        `resume_step` is the last step that a resumed run keeps; None for a fresh run.
        """

    def phase(self, name: str) -> None:
        """Report that the run enters this phase."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Take the global metrics of a finished step; a step may come again with other metrics."""

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Take samples, group by group.

        The columns are prompt, response, label, reward, finish_reason, length (response tokens),
        group, and some for programs (see readable()).
        """

    def close(self, status: str) -> None:
        """End the run as finished, failed or interrupted."""


class Observer(Sink):
    """Forwards every call to all sinks.

    Rank 0 has some and all other ranks have none, so the training loop is the same on all.
    """

    def __init__(self, sinks: Iterable[Sink] = ()):
        self._sinks = list(sinks)
        self._started: list[Sink] = []
        self.writer = Writer()
        """Writes the files of this rank."""

    def start(self, config: Settings, total_steps: int, resume_step: int | None = None) -> None:
        for sink in self._sinks:
            sink.start(config, total_steps, resume_step)
            self._started.append(sink)

    def phase(self, name: str) -> None:
        for sink in self._sinks if name else ():
            sink.phase(name)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for sink in self._sinks:
            self._call(sink, partial(sink.log, step, metrics))

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        for sink in self._sinks:
            self._call(sink, partial(sink.samples, step, rows))

    def close(self, status: str) -> None:
        # Every sink that was started is closed, even when another one fails to close.
        with ExitStack() as stack:
            for sink in self._started:
                stack.callback(sink.close, status)
            if status == "failed":  # the run has an error already
                self.writer.wait()
            else:
                self.writer.flush()

    def _call(self, sink: Sink, call: Callable[[], None]) -> None:
        if sink.in_background:
            self.writer.submit(call)
        else:
            call()


class JsonLines(Sink):
    """Writes `metrics.jsonl` and `samples.jsonl`: one JSON object per line, NaN and infinity null.

    A resumed run first drops the rows after the checkpoint, so no step is there twice. A fresh run
    in a used folder moves the earlier files to `*.previous.jsonl`.
    """

    in_background = True

    def __init__(self, folder: Path | str):
        self._paths = [Path(folder) / "metrics.jsonl", Path(folder) / "samples.jsonl"]
        self._files: list[IO[bytes]] = []

    def start(self, config: Settings, total_steps: int, resume_step: int | None = None) -> None:
        for path in self._paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                truncate_rows(path, resume_step)
            elif path.exists():
                path.replace(path.with_suffix(".previous.jsonl"))
            self._files.append(path.open("ab"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._write(0, [{"step": step, **metrics}])

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        self._write(1, [{"step": step, **row} for row in rows])

    def close(self, status: str) -> None:
        for file in self._files:
            file.close()

    def _write(self, index: int, rows: list[dict[str, Any]]) -> None:
        try:
            self._files[index].write(b"".join(encode_row(row) for row in rows))
            self._files[index].flush()
        except OSError as error:  # unlike a failed open, a failed write does not name the file
            raise OSError(error.errno, error.strerror, str(self._paths[index])) from error


class TensorBoard(Sink):
    """Writes event files to `tensorboard/`; a resumed run hides the steps that it repeats."""

    in_background = True

    def __init__(self, folder: Path | str):
        self._folder = Path(folder) / "tensorboard"

    def start(self, config: Settings, total_steps: int, resume_step: int | None = None) -> None:
        # This import takes a second, and only this sink needs it.
        from torch.utils.tensorboard import SummaryWriter

        first_step = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(self._folder, purge_step=first_step)
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", _code_block(text), first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        for index, row in enumerate(readable(rows)):
            text = json.dumps(row, indent=2, ensure_ascii=False)
            self._writer.add_text(f"samples/{index}", _code_block(text), step)

    def close(self, status: str) -> None:
        self._writer.close()


def readable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples without the columns that are not text for people."""
    unread = (PROMPT_IDS, RESPONSE_IDS, THUMBNAILS, SOUNDS)
    return [{name: value for name, value in row.items() if name not in unread} for row in rows]


def encode_row(row: dict[str, Any]) -> bytes:
    """Encode a row as one line of JSON, with non-finite numbers as null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    # UTF-8 cannot encode a lone surrogate, but JSON can encode the escape that it becomes.
    return json.dumps(finite, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file; none if it does not exist.

    Each row is an object with a number `step`. A kill or a power failure can leave a broken line
    anywhere; it is dropped with a warning.
    """
    if not path.exists():
        return []

    rows = []
    broken = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if (row := _row_of(line)) is not None:
                rows.append(row)
            else:
                broken.append(number)

    if broken:
        logger.warning(
            "{}: {} invalid lines are skipped, the first is line {}", path, len(broken), broken[0]
        )

    return rows


def read_ends(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the first and the last `count` rows of a JSON Lines file of any size."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        first = list(islice(file, count))
        begin = file.tell()
        start = max(begin, path.stat().st_size - TAIL_BYTES)
        file.seek(start)
        # The read may begin inside a line, so the first piece is dropped.
        last = file.readlines()[1 if start > begin else 0 :][-count:]
    return [row for line in first + last if (row := _row_of(line)) is not None]


def _row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line, or None if the line is broken."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if line.endswith(b"\n") and isinstance(row, dict) and is_number(row.get("step")):
        return row
    return None


def truncate_rows(path: Path, last_step: int) -> None:
    """Keep the rows up to this step.

    The file is replaced atomically: after a kill it is either the old one or the new one.
    """
    rows = [row for row in read_rows(path) if row["step"] <= last_step]
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        file.write(b"".join(encode_row(row) for row in rows))
        os.fsync(file.fileno())
    unfinished.replace(path)


def _code_block(text: str) -> str:
    """Return Markdown that shows the text verbatim: four spaces before every line."""
    return "\n".join("    " + line for line in text.split("\n"))


# -- samples as rows


def sample_rows(samples: list[Sample]) -> list[dict[str, Any]]:
    """Return a row of samples.jsonl for each sample, for people and for programs.

    Thumbnails and sound of a prompt are in the first row of the group.
    """
    rows = []
    groups = set()
    for sample in samples:
        prompt = sample.prompt
        media = {} if sample.group in groups else prompt.multi_modal
        groups.add(sample.group)
        shown = [*media.get("images", ()), *media.get("videos", ())]
        pictures = [item.thumbnail() for item in shown]
        sounds = [item.player() for item in media.get("audios", ())]
        names = {kind: [item.name for item in items] for kind, items in prompt.multi_modal.items()}

        row = {
            "group": sample.group,
            "prompt": prompt.text,
            **names,
            "response": sample.text,
            "label": prompt.columns.get("label"),
            "reward": sample.reward,
            "finish_reason": sample.finish_reason,
            "length": len(sample.token_ids),
            PROMPT_IDS: list(prompt.token_ids),
            RESPONSE_IDS: sample.token_ids,
            **(_episode(sample.episode) if sample.episode else {}),
            **({THUMBNAILS: pictures} if pictures else {}),
            **({SOUNDS: sounds} if sounds else {}),
        }
        rows.append(row)

    return rows


def _episode(episode: Episode) -> dict[str, Any]:
    branches = [branch.episode.messages for branch in episode.branches]
    return {"messages": episode.messages, "problem": episode.problem} | (
        {BRANCHES: branches} if branches else {}
    )
