"""Plain values of a row: what JSON can hold, and bytes.

    {"day": date(2024, 5, 1), "price": Decimal("7.50")}  ->  {"day": "2024-05-01", "price": 7.5}

A row passes through here once, when it is loaded. So rewards in other processes, servers, files
and reports all receive the same values, and none of them meets a type that it does not know.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from lightrft.config.values import check_text

DataRow = tuple[str, dict[str, Any]]
"""Location of a row of a data set (`train.jsonl:12`) and the columns."""
VALUE_KINDS = "text, a number, true, false, a date, a list or an object"
DEEPEST = 100
"""How deep lists and objects may lie in one another: everything that reads a row goes through them.
"""


@dataclass(frozen=True)
class Unreadable:
    """A value of Arrow that Python cannot hold, such as a date in the year 300,000."""

    kind: str
    reason: str


def table_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table as Python's values.

    A value that Python cannot hold becomes Unreadable.
    """
    columns = [_column(table.column(name)) for name in table.column_names]
    for values in zip(*columns, strict=True):
        yield dict(zip(table.column_names, values, strict=True))


def _column(column: pa.ChunkedArray) -> list[Any]:
    try:
        values = column.to_pylist(maps_as_pydicts="strict")
    except Exception:  # one value makes pyarrow, Python's datetime or the time zones fail
        values = [_cell(cell) for cell in column]
    return [_parsed(text) for text in values] if isinstance(column.type, pa.JsonType) else values


def _cell(cell: pa.Scalar) -> Any:
    try:
        return cell.as_py(maps_as_pydicts="strict")
    except Exception as error:
        return Unreadable(str(cell.type), f"{type(error).__name__}: {error}")


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        return Unreadable("JSON", str(error))


def plain_row(row: Mapping[str, Any], *, leave: Collection[str] = ()) -> dict[str, Any]:
    """Return a row with plain values; the columns `leave` stay as they are.

    Raise ValueError for a value without a plain form, and name its column.
    """
    return {
        _key(name, "the name of a column"): value
        if name in leave
        else plain(value, f"the column {name!r}")
        for name, value in row.items()
    }


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return the plain value; `where` says where it stands. Raise ValueError if there is none.

    Decimals become numbers, or text if a float cannot hold their digits. Dates and times become
    text in ISO 8601, durations seconds. NumPy's values become Python's.
    """
    if isinstance(value, str):
        check_text(value, where)
        return value
    if value is None or isinstance(value, bytes | int | float):
        return value
    if depth == DEEPEST:
        raise ValueError(f"{where} has lists or objects that are nested more than {DEEPEST} deep")
    if isinstance(value, Mapping):
        return {_key(key, where): plain(each, where, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, where, depth + 1) for inner in value]
    if isinstance(value, Decimal):
        return _number(value)

    if isinstance(value, datetime | date | time):
        return value.isoformat() if value == value else None  # noqa: PLR0124, NaT of pandas
    if isinstance(value, timedelta):
        if value != value:  # noqa: PLR0124, NaT of pandas
            return None
        return _number(Decimal(str(value.total_seconds())))
    if isinstance(value, UUID | np.datetime64):
        return str(value)
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist(), where, depth)

    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Unreadable):
        raise ValueError(f"{where} has a {value.kind} that cannot be read ({value.reason})")

    raise ValueError(
        f"{where} has a value of type {type(value).__name__}, which is not {VALUE_KINDS}; "
        "convert it, or leave the column out"
    )


def _key(name: Any, where: str) -> str:
    name = plain(name, where)
    return name if isinstance(name, str) else str(name)


def _number(value: Decimal) -> int | float | str:
    if not value.is_finite():
        return float(value)
    if value == value.to_integral_value():
        return int(value)
    number = float(value)
    return number if Decimal(repr(number)) == value else format(value, "f")


def label_value(value: Any, name: str) -> Any:
    """Return a plain value as a label: what JSON can hold, with NaN as null and bytes as text.

    Raise ValueError for infinite numbers, and for bytes that are not UTF-8.
    """
    if isinstance(value, Mapping):
        return {key: label_value(inner, name) for key, inner in value.items()}
    if isinstance(value, list):
        return [label_value(inner, name) for inner in value]
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError(f"the column {name!r} (--label_key) is {value}, not a finite number")
        return None if math.isnan(value) else value
    if not isinstance(value, bytes):
        return value

    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the column {name!r} (--label_key) has bytes that are not text in UTF-8: {value!r:.60}"
        ) from error
