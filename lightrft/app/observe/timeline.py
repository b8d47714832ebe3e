"""Write a timeline of all ranks, for https://ui.perfetto.dev or chrome://tracing."""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from lightrft.core.metrics import Span

OPENING = "[\n"
CLOSING = "\n]\n"


def extend_timeline(path: Path, step: int, spans_of_ranks: Sequence[Sequence[Span]]) -> None:
    """Add what each rank did in a step to a file of trace events; it is complete after every step.

    The format is Google's Trace Event Format, a JSON array. A rank is a process. Phases are nested,
    as complete events (X). Calls of other tracks may overlap, as asynchronous events (b, e). An
    idle phase has the category `idle`.
    """
    numbers = count()
    events = [
        event
        for rank, spans in enumerate(spans_of_ranks)
        for event in _events(step, rank, spans, numbers)
    ]
    text = ",\n".join(map(json.dumps, events)) + CLOSING
    path.touch()

    # Only the end of the array is overwritten, so the cost does not grow with the file.
    with path.open("r+", errors="replace") as file:
        end = max(0, path.stat().st_size - len(CLOSING))
        file.seek(end)
        whole = file.read() == CLOSING
        file.seek(end if whole else 0)
        # A process that was killed may have left a part of an array. It begins anew.
        file.truncate()
        file.write((",\n" if whole else OPENING) + text)


def _events(
    step: int, rank: int, spans: Sequence[Span], numbers: Iterator[int]
) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for span in spans:
        began, ended = (round(1e6 * seconds, 1) for seconds in (span.began, span.ended))
        common = {"pid": rank, "tid": 0, "ts": began, "args": {"step": step}}
        if span.track:
            call = common | {"cat": span.track, "name": span.name, "id": next(numbers)}
            yield call | {"ph": "b"}
            yield call | {"ph": "e", "ts": ended}
        else:
            name = span.name.rpartition("/")[2]
            kind = "idle" if span.idle else "phase"
            yield common | {"ph": "X", "name": name, "cat": kind, "dur": round(ended - began, 1)}
