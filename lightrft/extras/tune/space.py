"""The question of a search and its metric: read from the command line, and checked before any run."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, get_origin

from lightrft.app.cli import read_command_line
from lightrft.config.errors import ConfigError
from lightrft.config.resolve import resolve
from lightrft.config.sections import aliases, field_types, fields_read
from lightrft.config.tables import table
from lightrft.config.values import nearest, typed_value

LOW_AND_HIGH = re.compile(r"(?P<low>[^:,]+)\.\.(?P<high>[^:,]+?)(?P<log>:log)?")
OVER_FORMS = "NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=ONE,OTHER"
OF_TUNE = (
    *("save_path", "ckpt_path", "load_checkpoint", "overwrite", "fork_from", "at", "dry_run"),
    *("seed", "max_steps", "num_episodes", "eval_steps", "eval_data", "replay_rollouts"),
)
"""Options that are no question: what tune sets itself, and what would change the scale."""
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
        raise ConfigError(f"--over {name}: {command} has no such option{nearest(name, known)}")
    if name in OF_TUNE:
        raise ConfigError(f"--over {name}: tune sets it itself, or all trials have the same")

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


def combinations(parameters: Sequence[Parameter]) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the values; a range has two, its ends."""
    for values in product(*(each.values for each in parameters)):
        yield {each.name: value for each, value in zip(parameters, values, strict=True)}


def as_flags(values: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def check_values(
    parameters: Sequence[Parameter], flags: Sequence[str], command: str, ranks: int
) -> None:
    """Raise ConfigError with the message of the first combination that the configuration refuses."""
    for values in islice(combinations(parameters), MOST_COMBINATIONS):
        new = as_flags(values)
        try:
            resolve(read_command_line([*flags, *new], command), command, ranks)
        except ConfigError as error:
            raise ConfigError(f"--over: a run with {' '.join(new)} is refused: {error}") from None


def lower_is_better(metric: str, command: str) -> bool:
    """Return the direction of a metric; raise ConfigError if the run logs none of the name."""
    metrics: dict[str, list[str]] = table("extras/tune/metrics")[command]
    general = re.sub(r"_at_\d+$", "_at_N", re.sub(r"^eval/[^/]+/", "eval/", metric))
    for direction, names in metrics.items():
        if general in names:
            return direction == "lower"
    known = [*metrics["higher"], *metrics["lower"]]
    hint = f"{nearest(metric, known)} {command} has {', '.join(known)};".lstrip("; ")
    raise ConfigError(f"--metric {metric}: {hint} for your own, add --maximize or --minimize")
