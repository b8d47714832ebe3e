"""The question of a search and its metric: read from the command line, and checked before any run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, get_origin

from lightrft.app.cli import read_command_line
from lightrft.config.errors import ConfigError, refuse
from lightrft.config.resolve import resolve
from lightrft.config.sections import Config, aliases, field_types, fields_read
from lightrft.config.tables import table
from lightrft.config.values import nearest, typed_value
from lightrft.extras.compat import counterparts

LOW_AND_HIGH = re.compile(r"(?P<low>[^:,]+)\.\.(?P<high>[^:,]+?)(?P<log>:log)?")
OVER_FORMS = "NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=ONE,OTHER"
OUT_OF_PLACE: dict[str, dict[str, str]] = table("extras/tune/refused")
"""Where an option is refused -> its name -> the reason."""
DIRECTIONS: dict[str, dict[str, list[str]]] = table("extras/tune/metrics")
"""Command -> direction -> the metrics that are better in it."""
MOST_COMBINATIONS = 64
"""Number of combinations that are checked before the first run."""


@dataclass(frozen=True)
class Parameter:
    """An option that is searched."""

    name: str
    values: tuple[Any, ...]
    """The choices, or both ends of a range."""
    is_range: bool = False
    log: bool = False
    """True if values are drawn evenly over the logarithms of the range."""

    def at(self, share: float) -> Any:
        """Return the value at a share, from 0 to 1, of the range or of the choices."""
        if not self.is_range:
            return self.values[int(share * len(self.values))]
        low, high = self.values
        value = low * (high / low) ** share if self.log else low + share * (high - low)
        return round(value) if isinstance(low, int) else value


def read_parameters(words: Sequence[str], command: str) -> list[Parameter]:
    """Return the parameters of --over; raise ConfigError for what no run of the command has."""
    if not words:
        raise ConfigError(f"say what to search: --over {OVER_FORMS}")

    found = [_parameter(word, command) for word in words]
    if len({each.name for each in found}) < len(found):
        raise ConfigError("--over: an option occurs twice; write all of its values in one place")
    return found


def _parameter(word: str, command: str) -> Parameter:
    written, equals, text = word.removeprefix("--").partition("=")
    name = aliases().get(written.replace("-", "_"), written.replace("-", "_"))
    if not equals or not text:
        raise ConfigError(f"--over {word}: write {OVER_FORMS}")
    known = fields_read(command)
    if name not in known:
        theirs = counterparts.names("trl")
        hint = f"; {counterparts.answer(theirs[name])}" if name in theirs else nearest(name, known)
        raise ConfigError(f"--over {name}: {command} has no such option{hint}")
    if reason := (OUT_OF_PLACE["everywhere"] | OUT_OF_PLACE["over"]).get(name):
        raise ConfigError(f"--over {name}: {reason}")

    kind = field_types()[name]
    if get_origin(kind) is list:
        raise ConfigError(f"--over {name}: each of its values is a list, and cannot be searched")
    found = LOW_AND_HIGH.fullmatch(text)
    texts = [found["low"], found["high"]] if found else [each for each in text.split(",") if each]
    try:
        values = tuple(dict.fromkeys(typed_value(kind, each) for each in texts))
    except ValueError as error:
        raise ConfigError(f"--over {name}: {error}") from None

    if len(values) < 2:
        raise ConfigError(f"--over {word}: one value is no question; write it as --{name} instead")
    if not found:
        return Parameter(name, values)
    low, high = values
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in values):
        raise ConfigError(f"--over {name}: only numbers have a range; write its values: ONE,OTHER")
    if low > high or (found["log"] and low <= 0):
        raise ConfigError(f"--over {word}: LOW is below HIGH, and with :log above 0")
    return Parameter(name, values, is_range=True, log=bool(found["log"]))


def as_flags(values: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def check_flags(config: Config) -> None:
    """Raise ConfigError with the options that are set, but have no place in a search."""
    reasons = OUT_OF_PLACE["everywhere"]
    changed = [name for name in reasons if getattr(config, name) != getattr(Config(), name)]
    refuse([f"--{name} in a search: {reasons[name]}" for name in changed])


def written_values(config: Config) -> dict[str, Any]:
    """Return the values that are set in flags and files, by flat names."""
    return config.values_of(sorted(config.written))


def refusal(values: Mapping[str, Any], flags: Sequence[str], command: str, ranks: int) -> str:
    """Return why the configuration refuses a combination; empty if it does not."""
    from lightrft.algorithms.unread import unread_flags

    try:
        config = read_command_line([*flags, *as_flags(values)], command)
        resolve(config, command, ranks)
        unread_flags(config.algorithm)  # which looks up the names of functions
    except ValueError as error:
        return str(error)
    return ""


def check_values(
    parameters: Sequence[Parameter], flags: Sequence[str], command: str, ranks: int
) -> None:
    """Raise ConfigError with the message of the first combination that the configuration refuses.

    Both ends of a range are tried.
    """
    names = [each.name for each in parameters]
    for chosen in islice(product(*(each.values for each in parameters)), MOST_COMBINATIONS):
        values = dict(zip(names, chosen, strict=True))
        if reason := refusal(values, flags, command, ranks):
            new = " ".join(as_flags(values))
            raise ConfigError(f"--over: a run with {new} is refused: {reason}")


def general_name(metric: str) -> str:
    """Return the name of a metric in the table, which has no names of sets and no numbers."""
    return re.sub(r"_at_\d+$", "_at_N", re.sub(r"^eval/[^/]+/", "eval/", metric))


def lower_is_better(metric: str, command: str, minimize: bool, maximize: bool) -> bool:
    """Return the direction of a metric, which the user says for one of their own.

    Raise ConfigError for what the user has not said, or has said wrongly.
    """
    metrics = DIRECTIONS[command]
    for direction, names in metrics.items():
        if general_name(metric) in names:
            if minimize if direction == "higher" else maximize:
                raise ConfigError(f"--metric {metric}: {direction} is better, not the contrary")
            return direction == "lower"
    if minimize != maximize:
        return minimize
    known = [*metrics["higher"], *metrics["lower"]]
    hint = f"{nearest(metric, known)} {command} has {', '.join(known)};".lstrip("; ")
    raise ConfigError(f"--metric {metric}: {hint} for your own, add --maximize or --minimize")
