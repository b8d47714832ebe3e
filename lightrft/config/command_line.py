"""The command line and the YAML file, as a configuration.

    torchrun -m lightrft.cli.train_ppo --config configs/quickstart.yaml --actor_learning_rate 1e-3

The file gives defaults, flags override it.
"""

import argparse
import ast
import inspect
import sys
import textwrap
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from lightrft.config.sections import SECTIONS, Config, ConfigError, section_of_field

RENAMED = {"--remote_rm_url": "--reward"}
SWITCHES: dict[str, list[str]] = {
    "--disable_engine_sleep": ["--no_enable_engine_sleep"],
    "--packing_samples": ["--batching=packed"],
    "--use_fire": ["--first_token_temperature=10"],
    "--flash_attn": [],  # always, where the device has it
    "--save_trajectories": [],  # always; --num_trajectories_to_save says how many
}
"""Flags of the launch scripts of this family of tools, and what they are here."""
ALSO = f"Understood as well: {', '.join([*RENAMED, *SWITCHES])}; docs/launching.md says what they are here."


def parse(argv: list[str] | None = None, description: str = "") -> tuple[Config, set[str]]:
    """Configuration from `--config file.yaml` and flags, and the names of the fields that the user wrote."""
    argv = list(sys.argv[1:] if argv is None else argv)
    files, flags = _split_config_flag(argv)
    arguments = [token for file in files for token in _arguments_of_file(file)] + _translated(flags)
    parser = _Parser(list(SECTIONS.values()), description=description, epilog=ALSO, allow_abbrev=False)
    documentation = {name: text for cls in SECTIONS.values() for name, text in field_docs(cls).items()}
    for action in parser._actions:
        action.help = documentation.get(action.dest, action.help).replace("%", "%%")
        if isinstance(action, argparse._StoreFalseAction):
            action.help, action.default = f"Switch off --{action.dest}.", argparse.SUPPRESS
    _check_flag_names(arguments, set(parser._option_string_actions))
    *sections, stray = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    if stray:
        raise ConfigError(f"unexpected {' '.join(stray)}: every value follows its --flag. All flags: --help")
    options = parser._option_string_actions  # --eps-clip is --eps_clip, and --no_fsdp is of fsdp
    written = {options[token.split("=")[0]].dest for token in arguments if token.startswith("--")}
    return Config(**dict(zip(SECTIONS, sections, strict=True))), written


def _translated(flags: list[str]) -> list[str]:
    """Switches come first, so that a flag of ours beside them wins. ConfigError for one that is switched off."""
    parser = _Parser([], add_help=False, allow_abbrev=False)
    for name in SWITCHES:
        parser.add_argument(name, nargs="?", const="true", dest=name)
    values, rest = parser.parse_known_args(flags)
    given = {name: value for name, value in vars(values).items() if value is not None}
    for name, value in given.items():
        if value.lower() != "true":
            raise ConfigError(f"{name} {value}: it stands alone, or with true; leave it out. {ALSO}")
    split = [flag.partition("=") for flag in rest]
    switches = [token for name in given for token in SWITCHES[name]]
    return switches + [RENAMED.get(name, name) + equals + value for name, equals, value in split]


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        before.target.id: " ".join(after.value.value.split())
        for before, after in zip(body, body[1:], strict=False)
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


class _Parser(HfArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(f"{message.rstrip('.')}. All flags: --help")


def _split_config_flag(argv: list[str]) -> tuple[list[str], list[str]]:
    files, rest = [], []
    tokens = iter(argv)
    for token in tokens:
        if token == "--config":
            file = next(tokens, None)
            if file is None:
                raise ConfigError("--config needs a file")
            files.append(file)
        elif token.startswith("--config="):
            files.append(token.removeprefix("--config="))
        else:
            rest.append(token)
    return files, rest


def _arguments_of_file(file: str) -> list[str]:
    """A YAML file as the flags that say the same, so that types and choices are checked in one place."""
    try:
        content = yaml.safe_load(Path(file).read_text()) or {}
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {file}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: holds no sections, such as `train:` with `seed: 1` under it")
    arguments = []
    owners = section_of_field()
    for section, values in content.items():
        if section not in SECTIONS:
            moved = f"; it belongs under `{owners[section]}:`" if section in owners else _nearest(section, SECTIONS)
            raise ConfigError(f"--config {file}: unknown section {section!r}{moved}")
        if not isinstance(values, dict | None):
            raise ConfigError(f"--config {file}: `{section}:` holds {values!r} instead of keys with values")
        for name, value in (values or {}).items():
            if owners.get(name) != section:
                moved = f"; it belongs under `{owners[name]}:`" if name in owners else _nearest(name, owners)
                raise ConfigError(f"--config {file}: unknown key {name!r} under `{section}:`{moved}")
            if value is None or value == []:
                continue
            if isinstance(value, list):
                arguments += [f"--{name}", *map(str, value)]
            else:
                arguments.append(f"--{name}={value}")  # one word, so that text may begin with a dash
    return arguments


def _check_flag_names(arguments: list[str], known: set[str]) -> None:
    unknown = [token.split("=")[0] for token in arguments if token.startswith("--") and token.split("=")[0] not in known]
    if unknown:
        raise ConfigError("; ".join(f"unknown flag {flag}{_meant(flag, known)}" for flag in unknown) + " All flags: --help")


def _meant(flag: str, known: set[str]) -> str:
    switch = flag.replace("--no_", "--", 1)
    return f"; switch it off with {switch} false." if switch != flag and switch in known else _nearest(flag, known) or "."


def _nearest(name: str, known: Any) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
