"""Take the arguments of TRL's trainers in Python: data, functions, GRPOConfig, LoraConfig."""

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from lightrft.config.errors import ConfigError
from lightrft.config.sections import aliases, section_of_field
from lightrft.extras.compat.counterparts import defaults, names, table, translate

TRAINER_OBJECTS = ("args", "peft_config", "processing_class")
"""Arguments that hold others, or that are objects here too."""


def taken(command: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return values under the names of this program, and sentences about what was translated.

    Batches are counted on as many devices as the launcher started processes. Raises ConfigError for
    a value that TRL's user set and that has no counterpart.
    """
    native = section_of_field().keys() | aliases() | {"model", "tokenizer"}
    known = names("trl", command).keys() | set(TRAINER_OBJECTS)
    theirs = {name: value for name, value in values.items() if name in known - native}
    if not theirs:
        return dict(values), []

    ours = {name: value for name, value in values.items() if name not in theirs}
    adapter: dict[str, Any] = {}
    if (config := theirs.pop("peft_config", None)) is not None:
        adapter = table("trl")["defaults"]["lora"] | _changed(config, "lora")
    left_alone: dict[str, Any] = {}
    if (config := theirs.pop("args", None)) is not None:
        left_alone = defaults("trl", command)
        theirs = _changed(config, command) | theirs
    if (tokenizer := theirs.pop("processing_class", None)) is not None:
        ours.setdefault("tokenizer", tokenizer)

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    found = translate("trl", left_alone | theirs, command, ranks=ranks)
    lora = translate("trl", adapter, command, rows="lora")
    problems = [
        f"{name}: {sentence}"
        for name, sentence in (found.notes | lora.notes).items()
        if name in theirs or name in adapter
    ]
    if problems:
        raise ConfigError("; ".join(problems) + ". Names of TRL: docs/migrating.md")

    flags = {name: value for name, value in (found.flags | lora.flags).items() if name not in ours}
    said = ", ".join(
        f"{name} {value}" if isinstance(value, str | int | float) else name
        for name, value in flags.items()
    )
    return flags | ours, [f"understood from TRL: {said}"]


def _changed(config: Any, owner: str) -> dict[str, Any]:
    """Return the fields of a configuration that differ from their defaults.

    `owner` is a command, or "lora": other classes have other defaults, or mean something else.
    """
    expected = table("trl")["objects"].get(owner, "")
    if expected not in [item.__name__ for item in type(config).__mro__]:
        where = "peft_config" if owner == "lora" else f"args of {owner}"
        raise ConfigError(f"{where} is an object of {expected}, not of {type(config).__name__}")

    plain = {
        item.name: item.default if item.default_factory is MISSING else item.default_factory()
        for item in fields(config)
        if item.init
    }
    values = {name: getattr(config, name) for name in plain}
    return {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in values.items()
        if value is not None and value != plain[name]
    }
