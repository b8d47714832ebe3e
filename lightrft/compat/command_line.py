"""Read command lines, files and values that may have names of other tools and former names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightrft.compat import openrlhf
from lightrft.compat.renamed import current_flags, current_keys, current_names
from lightrft.compat.trl import TRL_FLAGS
from lightrft.compat.verl import is_verl_key, verl_problems
from lightrft.config import command_line
from lightrft.config.command_line import Flags, group_flags
from lightrft.config.sections import Config


def parse(
    argv: Sequence[str] | None = None, command: str = "train_ppo", description: str = ""
) -> Config:
    """Return the configuration of a command line, not yet resolved.

    Flags of LightRFT and OpenRLHF are translated, flags of TRL and verl are answered with the ones
    to write instead. Otherwise this is lightrft.config.parse().
    """
    return command_line.parse(
        argv, command, description, read_flags=translate, read_keys=current_keys
    )


def load(file: str | Path) -> Config:
    """Return the configuration of a YAML file, not yet resolved."""
    return parse(["--config", str(file)])


def update(config: Config, values: Mapping[str, Any]) -> None:
    """Set values by names that may be former ones."""
    config.update(current_names(values, config))


def translate(tokens: list[str], config: Config) -> tuple[Flags, list[str]]:
    """Return the flags of this program with the meaning of a command line, and a sentence for each
    flag that has no counterpart. Notices go to `config`.
    """
    problems = verl_problems([token for token in tokens if is_verl_key(token)])
    written = group_flags([token for token in tokens if not is_verl_key(token)])

    translation = openrlhf.translate(written)
    config.notices += translation.notices
    problems += translation.refused

    for name in [name for name in translation.flags if name in TRL_FLAGS]:
        answer = TRL_FLAGS[name]
        hint = answer if " " in answer else f"the flag here is --{answer}"
        problems.append(f"unknown flag --{name}; {hint}")
        del translation.flags[name]

    return current_flags(translation.flags, config), problems
