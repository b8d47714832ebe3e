"""Other and former names of flags and values, which work in files, on the command line and from
Python; the help omits them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Renamed:
    """A flag under another name."""

    section: str
    kind: type
    now: Callable[[Any, dict[str, Any]], dict[str, Any]]
    """Function from its value, and the fields that the same source sets, to the fields with the
    same meaning."""
    flag: str = ""
    """Flag to write instead; empty: both names are equally good."""
    reads: str = ""
    """Field whose value `now` finds among the others, also if another source set it."""


def _destination(name: str) -> Renamed:
    """Return the former switch of a destination of metrics, which adds it to the others or removes
    it.
    """

    def now(enabled: bool, others: dict[str, Any]) -> dict[str, Any]:
        before = others["report_to"]
        names = before.split(",") if isinstance(before, str) else before
        rest = [each for each in names if each != name]
        return (
            {"report_to": ",".join([*rest, name] if enabled else rest or ["jsonl"])}
            if enabled != (name in names)
            else {}
        )

    return Renamed("observe", bool, now, f"--report_to with or without {name}", reads="report_to")


ALIASES = {"actor_learning_rate": "learning_rate"}
"""Other name of a field -> its name."""


def _alias(name: str, field: str) -> Renamed:
    def now(value: float, others: dict[str, Any]) -> dict[str, Any]:
        if others.get(field, value) not in (value, str(value)):
            raise ValueError(
                f"{value:g}, and {field}: {others[field]}, are two values of one field: set"
                " only one"
            )
        return {field: value}

    return Renamed("optim", float, now)


RENAMED = {
    **{name: _alias(name, field) for name, field in ALIASES.items()},
    "model": Renamed("model", str, lambda folder, _: {"pretrain": folder}, "--pretrain"),
    "reward_background": Renamed(
        "reward",
        bool,
        lambda background, _: {} if background else {"reward_workers": 0},
        "--reward_workers 0",
    ),
    "use_tensorboard": _destination("tensorboard"),
    "use_wandb": _destination("wandb"),
    **{
        f"wandb_{name}": Renamed(
            "observe",
            str,
            lambda value, _, name=name: {f"tracker_{name}": value},
            f"--tracker_{name}",
        )
        for name in ("project", "run_name", "org", "group")
    },
}


RENAMED_VALUES = {("bad_rows", "fail"): "stop"}
"""Flag and its former value -> its current value."""


def current_names(
    values: Mapping[str, Any], typed: Callable[[Any, Any], Any], config: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return the values under the current names, and a notice for each other name.

    `typed` converts a value to a type, and `config` has the fields that were set before.
    """
    current: dict[str, Any] = {name: value for name, value in values.items() if name not in RENAMED}
    notices = []
    for name in [name for name in RENAMED if name in values]:
        renamed = RENAMED[name]
        before = {renamed.reads: getattr(config, renamed.reads)} if renamed.reads else {}
        try:
            current |= renamed.now(typed(renamed.kind, values[name]), before | current)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        notices += [f"--{name} stands for {renamed.flag}"] if renamed.flag else []

    for name, former in RENAMED_VALUES:
        if current.get(name) == former:
            current[name] = RENAMED_VALUES[name, former]
            notices.append(
                f"--{name} {former} is the old form of a flag: use --{name} {current[name]}"
            )

    return current, notices
