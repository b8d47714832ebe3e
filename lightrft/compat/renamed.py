"""Former names of flags and values. They work on the command line, in files and from Python, and
the help omits them.
"""

from collections.abc import Mapping
from typing import Any

from lightrft.config.command_line import Flags
from lightrft.config.errors import ConfigError
from lightrft.config.sections import SECTIONS, Config
from lightrft.config.values import typed_value

RENAMED = {
    "model": "pretrain",
    **{f"wandb_{name}": f"tracker_{name}" for name in ("project", "run_name", "org", "group")},
}
"""Former name -> name of the field."""
DESTINATIONS = {"use_tensorboard": "tensorboard", "use_wandb": "wandb"}
"""Former switch -> the destination of metrics that it adds to the others, or removes."""
BACKGROUND = "reward_background"
"""Former switch: without it, rewards are computed in the process of the rank."""
SWITCHES = (*DESTINATIONS, BACKGROUND)
RENAMED_VALUES = {("bad_rows", "fail"): "stop"}
"""Flag and former value -> current value."""


def current_names(values: Mapping[str, Any], config: Config, source: str = "") -> dict[str, Any]:
    """Return the values under the current names, and add a notice to `config` for each other name.

    Fields that are set in `config` already count where the meaning of a name depends on them.
    `source` begins the message of a ConfigError for a value of the wrong type.
    """
    current = {name: value for name, value in values.items() if name not in (*RENAMED, *SWITCHES)}
    for name in [name for name in RENAMED if name in values]:
        current[RENAMED[name]] = values[name]
        config.notices.append(f"--{name} stands for --{RENAMED[name]}")

    for name in [name for name in SWITCHES if name in values]:
        try:
            enabled = typed_value(bool, values[name])
        except ValueError as error:
            raise ConfigError(f"{source}{name}: {error}") from error
        if name == BACKGROUND:
            current |= {} if enabled else {"reward_workers": 0}
            config.notices.append(f"--{name} stands for --reward_workers 0")
        else:
            before = current.get("report_to", config.observe.report_to)
            current |= _report_to(before, DESTINATIONS[name], enabled)
            config.notices.append(
                f"--{name} stands for --report_to with or without {DESTINATIONS[name]}"
            )

    for (name, former), value in RENAMED_VALUES.items():
        if current.get(name) in (former, [former]):
            current[name] = value
            config.notices.append(
                f"--{name} {former} is the old form of a flag: use --{name} {value}"
            )

    return current


def _report_to(before: str | list[str], name: str, enabled: bool) -> dict[str, str]:
    """Return the field of the destinations if switching one on or off changes it."""
    names = (before if isinstance(before, str) else ",".join(before)).split(",")
    if enabled == (name in names):
        return {}
    rest = [each for each in names if each != name]
    return {"report_to": ",".join([*rest, name] if enabled else rest or ["jsonl"])}


def current_flags(flags: Flags, config: Config) -> Flags:
    """Return flags under the current names; see current_names()."""
    values: dict[str, Any] = {}
    for name, words in flags.items():
        switch = name.removeprefix("no_")
        if switch in SWITCHES:
            values[switch] = switch == name and (words[0] if words else True)
        else:
            values[name] = words

    current = current_names(values, config, source="--")
    return {
        name: value if isinstance(value, list) else [str(value)] for name, value in current.items()
    }


def current_keys(content: dict[Any, Any], config: Config, source: str = "") -> dict[Any, Any]:
    """Return the content of a file under the current names; see current_names()."""
    content = {
        key: current_names(_set(value), config, source)
        if key in SECTIONS and isinstance(value, dict)
        else value
        for key, value in content.items()
    }
    alone = {key: value for key, value in content.items() if not isinstance(value, dict)}
    current = current_names(_set(alone), config, source)
    kept = {key: value for key, value in content.items() if key not in alone or key in current}
    return kept | current


def _set(values: dict[Any, Any]) -> dict[Any, Any]:
    return {name: value for name, value in values.items() if value is not None and value != []}
