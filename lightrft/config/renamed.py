"""Renamed flags and values: the old name still works in files, on the command line and from Python; the help omits it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Renamed:
    """A flag under its old name."""

    section: str
    kind: type
    now: Callable[[Any], dict[str, Any]]
    """Function from its value to the fields with the same meaning."""
    flag: str
    """Flag to write instead."""


RENAMED = {
    "reward_background": Renamed(
        "reward", bool, lambda background: {} if background else {"reward_workers": 0}, "--reward_workers 0"
    ),
}


RENAMED_VALUES = {("bad_rows", "fail"): "stop"}
"""Flag and its former value -> its current value."""


def current_names(values: Mapping[str, Any], typed: Callable[[Any, Any], Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values under the current names, and a notice for each old name; `typed` converts a value to a type."""
    found: dict[str, Any] = {name: value for name, value in values.items() if name not in RENAMED}
    notices = []
    for name in values.keys() & RENAMED.keys():
        known = RENAMED[name]
        try:
            found |= known.now(typed(known.kind, values[name]))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        notices.append(f"--{name} is the old name of a flag: use {known.flag}")
    for name, former in RENAMED_VALUES:
        if found.get(name) == former:
            found[name] = RENAMED_VALUES[name, former]
            notices.append(f"--{name} {former} is the old form of a flag: use --{name} {found[name]}")
    return found, notices
