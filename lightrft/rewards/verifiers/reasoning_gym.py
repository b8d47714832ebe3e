"""Scores of responses to tasks of the package reasoning-gym, by the task's own scorer."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import reasoning_gym

from lightrft.core.samples import Sample
from lightrft.rewards.functions import reads, tagged_answer

SCORE_SECONDS = 10
"""Time limit of a score; some scorers evaluate expressions of the response."""
WITH_TUPLES = frozenset({"arc_agi", "rearc"})
"""Tasks whose scorers compare grids of tuples; after any file format these are lists."""


class OutOfTime(Exception):
    """Raised in a scorer after SCORE_SECONDS."""


def _dictionary(value: Any) -> dict[str, Any]:
    """Return a column that is an object, or JSON text of one; empty if null.

    Raise ValueError otherwise.
    """
    value = json.loads(value) if isinstance(value, str) else value or {}
    if not isinstance(value, dict):
        raise ValueError(f"not an object of reasoning-gym: {value!r:.80}")
    return value


def _metadata(value: Any) -> dict[str, Any]:
    """Return the metadata of a row with a task. Raise ValueError for others."""
    metadata = _dictionary(value)
    if metadata.get("source_dataset") not in reasoning_gym.factory.DATASETS:
        task = metadata.get("source_dataset")
        raise ValueError(
            f"the column metadata names no task of reasoning-gym as source_dataset: {task!r}"
        )
    return metadata


@reads(metadata=_metadata, options=_dictionary)
def score_of_task(
    samples: list[Sample],
    answer: list[Any],
    metadata: list[Any],
    options: list[Any] | None = None,
    **_: Any,
) -> list[float]:
    """Return the score of each response, from 0 to 1, by the scorer of the row's task; 1 is right.

    The answer of a response is the text of its last <answer> tag; without one, the last line that
    is not empty, after any </think>. Some tasks give wrong answers a small score, such as 0.01. The
    columns are the same as in the package's rows, `metadata` and `options` dictionaries or JSON
    text. Raises ValueError for metadata without a task.
    """
    options = options or [None] * len(samples)
    rows = zip(samples, answer, metadata, options, strict=True)
    return [score_of_answer(sample.text, *row) for sample, *row in rows]


def given_answer(text: str) -> str:
    """Return the text of the last <answer> tag, or else the last line that is not empty."""
    text = text.rpartition("</think>")[2]
    if "<answer>" in text:
        return tagged_answer(text).strip()
    return (text.strip().splitlines() or [""])[-1].strip()


def score_of_answer(text: str, right: str | None, metadata: Any, options: Any = None) -> float:
    """Return the score of one response; for the arguments see score_of_task()."""
    answer = given_answer(text)
    metadata = _metadata(metadata)
    task = metadata["source_dataset"]
    if task in WITH_TUPLES:
        metadata = metadata | {"output": tuple(map(tuple, metadata["output"]))}

    row = {"answer": right, "metadata": metadata}
    score = _scorer(task, json.dumps(_dictionary(options), sort_keys=True))
    with _time_limit(SCORE_SECONDS):
        try:
            return float(score(answer, row))
        except (Exception, SystemExit):  # some scorers raise for answers that they cannot read
            score(right, row)  # and for rows, which is the user's error
            return 0.0


@cache
def _scorer(task: str, options: str) -> Callable[[str | None, dict[str, Any]], Any]:
    """Return the scorer of a task; for some tasks it depends on the task's options."""
    return reasoning_gym.create_dataset(task, **json.loads(options)).score_answer


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the main thread after `seconds`; other threads have no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGALRM, _raise)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def _raise(*_: Any) -> None:
    raise OutOfTime
