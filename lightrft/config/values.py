"""Values of configuration fields: types, bounds, and a record of what the user wrote."""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, NewType, Self, Union, get_args, get_origin

TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")
SHORTEST_FRAGMENT = 5
"""Number of characters of a fragment that is enough to find a name."""
LARGEST_INTEGER = 2**63 - 1
"""Largest whole number: larger ones fit into no tensor and no file format."""
COLDEST = 1e-6
HOTTEST = 1e6
"""Smallest and largest temperature beside 0; smaller ones would make logits infinite.
"""


@dataclass(frozen=True, slots=True)
class Bound:
    """A condition on the value of a field. None always satisfies it."""

    message: str
    """What the value must be, as the words after the flag: `must be above 0`."""
    holds: Callable[[Any], bool]
    """Judges a number, or each item of a list."""
    most: float = 2**31 - 1
    """Largest size of a number, positive or negative: no meaning needs a larger one, and sums and
    products of such numbers still fit."""
    whole: bool = False
    """Judge a list as one value."""

    def problem(self, value: Any) -> str:
        """Return what the value must be; empty if it is."""
        items = value if isinstance(value, list) else [value]
        if not (self.holds(value) if self.whole else all(map(self.holds, items))):
            return self.message

        numbers = [item for item in items if isinstance(item, int | float)]
        fit = all(abs(number) <= self.most for number in numbers)
        return "" if fit else f"must be at most {self.most:,}"

    def hint(self, text: str) -> "Bound":
        """Return the same bound with a message that goes on with `text`."""
        return replace(self, message=self.message + text)


def pair_bound(message: str, holds: Callable[[Any, Any], bool]) -> Bound:
    """Return the bound of a list of two numbers."""
    return Bound(message, lambda pair: len(pair) == 2 and holds(*pair), whole=True)


NUMBER = Bound("must be a number", lambda value: value == value)
"""Bound of a number that declares none."""
MINUTES = Bound("must be above 0", lambda value: value > 0, most=525_600)
"""At most a year."""
SECONDS = Bound("must be above 0", lambda value: value > 0, most=31_536_000)
PORT = Bound("must not be negative", lambda value: value >= 0, most=65_535)
SEED = Bound("must be a whole number", lambda value: True, most=LARGEST_INTEGER)
COUNT = Bound("must be at least 1", lambda value: value >= 1)
ABOVE_1 = Bound("must be above 1", lambda value: value > 1)
POSITIVE = Bound("must be above 0", lambda value: value > 0)
NOT_NEGATIVE = Bound("must not be negative", lambda value: value >= 0)
SHARE = Bound("must be between 0 and 1", lambda value: 0 <= value <= 1)
LEARNING_RATE = SHARE.hint("; 1e-6 is usual for all weights of a model, and 1e-4 for adapters")
"""Learning rate. AdamW changes each weight by about as much in a step, so one above 1 is a slip."""


@dataclass(frozen=True, slots=True)
class Option:
    """Values that a field of the configuration allows, and the flags that it needs."""

    bound: Bound | None = None
    needs: str | Mapping[str, str] = ""
    """Flags without which the field has no effect, as the user reads them: `--lora_rank`, or
    `--rm_loss ties`. A dict has a text for each command that needs something."""
    unless: str = ""
    """Flag that leaves the field without effect."""
    commands: Collection[str] = ()
    """Commands that read the field; empty: all that read the section."""
    alias: str = ""
    """Another name of the field."""


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if the file is missing or broken."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def check_text(text: str, where: str = "the text") -> None:
    """Raise ValueError for half of a surrogate pair: it is no character and has no bytes.

    JSON may have one, as an escape or as bytes, and Python reads it.
    """
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{where} contains {half!a}, half of a character") from error


def option(default: Any, bound: Bound | None = None, **details: Any) -> Any:
    """Declare a field of a section: the default, the bound and other fields of an Option."""
    metadata = {"option": Option(bound, **details)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


CommaSeparated = NewType("CommaSeparated", str)
"""Text with entries separated by commas; a list is accepted, too."""
Verbatim = NewType("Verbatim", str)
"""Text that may itself contain commas: as an item of a list, it is not split at them."""
JSONObject = NewType("JSONObject", str)
"""Text with a JSON object; a mapping, as YAML has it, is accepted, too."""


class Section:
    """Base of the configuration's dataclasses; `written` contains the names of the fields that were
    given or set.

        AlgorithmSection("gspo", eps_clip_low=0.2).written
        # {"advantage_estimator", "eps_clip_low"}
    """

    commands: ClassVar[Collection[str]] = ()
    """Commands that read the section."""
    written: set[str]

    def __init_subclass__(cls, commands: Collection[str] = ()) -> None:
        cls.commands = commands or cls.commands

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        section = super().__new__(cls)
        cls_fields = fields(cls)  # pyright: ignore[reportArgumentType]
        positional = [field.name for field in cls_fields[: len(args)]]
        object.__setattr__(section, "written", {*positional, *kwargs})
        return section

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:  # the dataclass's own __init__ sets each field for the first time
            self.written.add(name)
        super().__setattr__(name, value)

    def forget(self, *names: str) -> None:
        """Reset fields to the defaults, as if they had not been written."""
        default = type(self)()
        for name in names:
            self.put(name, getattr(default, name))
        self.written.difference_update(names)

    def put(self, name: str, value: Any) -> None:
        """Set a field without recording it as written."""
        object.__setattr__(self, name, value)


def typed_value(kind: Any, value: Any) -> Any:
    """Convert `value`, text or a Python object, to the declared type `kind`.

    Raises ValueError with the expected form.
    """
    if get_origin(kind) in (Union, UnionType):
        if value is None:
            return None
        return typed_value(next(arm for arm in get_args(kind) if arm is not type(None)), value)

    if get_origin(kind) is list:
        return _list(get_args(kind)[0], value)
    if get_origin(kind) is Literal:
        return _choice(get_args(kind), value)
    return _READERS[kind](value)


def _list(kind: Any, value: Any) -> list[Any]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list, not {value!r}")
    if kind is not Verbatim:
        value = [entry for item in value for entry in _entries(item)]
    return [typed_value(kind, item) for item in value]


def _entries(item: Any) -> list[Any]:
    """Split a text at commas: every list may be written so, on the command line and in files."""
    if not isinstance(item, str):
        return [item]
    return [entry for entry in map(str.strip, item.split(",")) if entry]


def _choice(choices: tuple[Any, ...], value: Any) -> Any:
    for choice in choices:
        if value == choice and not isinstance(value, bool) or str(value) == str(choice):
            return choice
    raise ValueError(f"invalid choice {value!r}; choose from {', '.join(map(str, choices))}")


def _bool(value: Any) -> bool:
    text = str(value).lower()
    if text in TRUE + FALSE:
        return text in TRUE
    raise ValueError(f"expected true or false, not {value!r}")


def _int(value: Any) -> int:
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            raise ValueError(f"expected an integer, not {value!r}") from None
    if isinstance(value, float) and value.is_integer():  # as YAML and TRL write whole numbers
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected an integer, not {value!r}")
    if abs(value) > LARGEST_INTEGER:
        raise ValueError(f"{str(value)[:20]}... is too large: the maximum is {LARGEST_INTEGER}")
    return value


def _float(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"expected a number, not {value!r}") from None
    except OverflowError:
        raise ValueError(f"{str(value)[:20]}... is too large") from None
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"expected a finite number, not {value!r}")
    return number


def _str(value: Any) -> str:
    if callable(value):
        if path := import_path(value):
            return path
        raise ValueError(
            f"{value!r} cannot be imported by its name: define the function at the top level of a"
            " module"
        )

    if isinstance(value, bool | int | float):
        return str(value)
    if not isinstance(value, str) and not isinstance(value, os.PathLike):
        raise ValueError(f"expected a string, not {value!r}")
    return str(value)


def import_path(function: Callable[..., Any]) -> str:
    """Return the `module:name` that registries find a function by; empty if it has no such
    name.
    """
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", "")
    return f"{module}:{name}" if getattr(sys.modules.get(module), name, None) is function else ""


def _comma_separated(value: Any) -> str:
    if not isinstance(value, list | tuple):
        return _str(value)
    return ",".join(entry for item in value for entry in _entries(_str(item)))


def _json_object(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, Mapping) else _str(value)
    try:
        content = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{text!r} is not a JSON object: " + '{"name": value}')
    return text


_READERS: dict[Any, Callable[[Any], Any]] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    CommaSeparated: _comma_separated,
    Verbatim: _str,
    JSONObject: _json_object,
}


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `; did you mean X?` for the most similar known name, or an empty string."""
    names = sorted(choices, key=len)
    letters = _letters(name)
    containing = []
    if len(letters) >= SHORTEST_FRAGMENT:
        containing = [each for each in names if letters in _letters(each)]
    # nsamples for n_samples_per_prompt
    beginnings = [each for each in containing if _letters(each).startswith(letters)]
    near = beginnings or get_close_matches(name, names, n=1, cutoff=0.7) or containing

    return f"; did you mean {near[0]}?" if near else ""


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name)
