"""Read a row's columns for the built-in rewards, first of all the label.

right_answers("7") == right_answers(7.0) == ["7"]        right_answers(["7", 8.5]) == ["7", "8.5"]
"""

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

Reader = Callable[[Any], Any]
"""Function that reads the value of a column, and raises ValueError for one that it cannot use."""

readers: dict[Callable[..., Any], dict[str, Reader]] = {}
"""Reward function -> readers of the columns that it has to understand, by name."""


def reads(**columns: Reader) -> Callable[[Any], Any]:
    """Let rows be checked when they are loaded: each reader must accept the value of the column."""

    def add(function: Any) -> Any:
        readers[function] = columns
        return function

    return add


def right_answers(label: Any) -> list[str]:
    """Return the texts of the right answers: a label is one answer, or a list of alternatives.

    A whole number gets no decimal point: a column of integers often becomes floats when some are
    missing. Raise ValueError for other values.
    """
    alternatives = label if isinstance(label, list | tuple) else [label]
    answers = [_answer(one) for one in alternatives if one is not None]
    if not answers:
        raise ValueError(f"the label {label!r} has no right answer")
    return answers


def _answer(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, Real | Decimal) or not math.isfinite(value):
        raise ValueError(
            f"the label {value!r:.80} is {_kind(value)}; it must be a text, a number, or a list of "
            "alternatives (--label_key names its column)"
        )
    return number_text(value)


def number_text(value: Any) -> str:
    """Return a number without an exponent, and a whole one without a decimal point."""
    return str(int(value)) if value == int(value) else format(Decimal(str(value)), "f")


def as_text(value: Any) -> str:
    """Return a value of a row as a text for people and models.

    It is JSON unless it is text or a number.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return number_text(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object with the keys {', '.join(map(str, value))}"
    kinds = {bool: "a boolean", list: "a list inside of a list", bytes: "bytes"}
    return kinds.get(type(value), f"of type {type(value).__name__}")
