"""Read the configuration from the command line and the YAML file.

    torchrun -m lightrft.cli.train_ppo --config configs/quickstart.yaml --learning_rate 1e-3

The file gives defaults, flags override it. Nothing heavy is imported here, so that a mistake is
reported at once.
"""

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml

from lightrft.config.commands import COMMANDS, fields_read
from lightrft.config.errors import ConfigError
from lightrft.config.other_tools import TRL_FLAGS, translate_flags
from lightrft.config.presets import DEFAULTS, PRESETS, recipe
from lightrft.config.renamed import ALIASES, RENAMED
from lightrft.config.sections import SECTIONS, Config, field_types, section_of_field
from lightrft.config.values import CommaSeparated, Verbatim, nearest

GROUPS = {
    "model": "models, their trained parameters, adapters",
    "data": "prompts, answers, templates",
    "strategy": "distribution of models and batches over the ranks",
    "engine": "generation engine and weight stream",
    "rollout": "prompts and samples of a step, sampling parameters",
    "environment": "environments and tools of responses with several turns",
    "reward": "reward functions, reward models, reward shaping",
    "algorithm": "advantages, losses, divergence from the reference",
    "preference": "pairs of answers, reward model training, DPO, KTO, steps",
    "server": "the address of serve and serve_reward",
    "optim": "learning rates and the optimizer",
    "train": "length of the run, batches, checkpoints",
    "observe": "metrics and their destinations",
}
"""Section -> its description in --help."""
HELP = ("-h", "--help")
VERSION = "--version"


def parse(
    argv: Sequence[str] | None = None, command: str = "train_ppo", description: str = ""
) -> Config:
    """Return the configuration of `--config file.yaml` and flags, not yet resolved; see resolve().

    Raises ConfigError for names that do not exist and values of the wrong type, all of one source
    in one message. `--help` and `--version` print and exit.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    _answer(argv, command, description)
    files, flags = _split_config_flag(argv)
    config = Config()
    for file in files:
        config.update(_values_of_file(file), source=f"--config {file}: ")
    translation = translate_flags(flags)
    values = _values_of_flags(translation.flags, translation.refused)
    config.notices += translation.notices
    # two forms of one choice: a flag of either replaces the value in a file
    if values.keys() & {"strategy", "fsdp"}:
        config.strategy.forget("strategy", "fsdp")
    config.update(values, source="--")

    return config


def load(file: str | Path) -> Config:
    """Return the configuration of a YAML file, not yet resolved."""
    return parse(["--config", str(file)])


def _values_of_flags(arguments: list[str], problems: list[str]) -> dict[str, Any]:
    """Return field name -> value; raise ConfigError with the unknown flags, and with the `problems`
    that were found before.
    """
    sections = section_of_field()
    names = [token.partition("=")[0] for token in arguments if token.startswith("--")]
    switches = {f"--no_{name}" for name, kind in field_types().items() if kind is bool}
    flags = {f"--{name}" for name in sections} | switches
    before = {f"--{name}" for name in RENAMED} | {
        f"--no_{name}" for name, old in RENAMED.items() if old.kind is bool
    }
    unknown = [
        f"unknown flag {name}{_suggestion(name, flags - switches)}"
        for name in names
        if name not in flags | before
    ]

    if found := [*unknown, *problems]:
        listed = (
            "; ".join(found)
            if len(found) < 4
            else "".join(f"\n  - {problem}" for problem in found) + "\n"
        )
        raise ConfigError(
            f"{listed.rstrip()}. All flags: --help all; of other tools: docs/migrating.md"
        )

    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, kind in (field_types() | {name: old.kind for name, old in RENAMED.items()}).items():
        if kind is bool:
            parser.add_argument(f"--{name}", nargs="?", const=True)
            parser.add_argument(f"--no_{name}", action="store_const", const=False, dest=name)
        else:
            several = {list: "*", CommaSeparated: "+"}
            parser.add_argument(f"--{name}", nargs=several.get(get_origin(kind) or kind))

    values, stray = parser.parse_known_args(arguments)
    if stray:
        raise ConfigError(
            f"unexpected {' '.join(stray)}: a value must follow its --flag. All flags: --help all"
        )

    return vars(values)


def _suggestion(name: str, flags: set[str]) -> str:
    answer = TRL_FLAGS.get(name.removeprefix("--"), "")
    if " " in answer:
        return f"; {answer}"
    return f"; the flag here is --{answer}" if answer else nearest(name, flags).rstrip("?")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.rstrip('.')}. All flags: --help all")


# -- files


def _split_config_flag(argv: list[str]) -> tuple[list[str], list[str]]:
    files = []
    rest = []
    tokens = iter(argv)
    for token in tokens:
        if token == "--config":
            file = next(tokens, None)
            if file is None:
                raise ConfigError("--config needs the path of a YAML file")
            files.append(file)
        elif token.startswith("--config="):
            files.append(token.removeprefix("--config="))
        else:
            rest.append(token)

    return files, rest


class _UniqueKeys(yaml.SafeLoader):
    """Loader that refuses duplicate keys of a mapping, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice", node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


def _values_of_file(file: str) -> dict[str, Any]:
    """Return field name -> value of a YAML file.

    Keys may be under their sections, or without sections.
    """
    try:
        content = yaml.load(Path(file).read_text(encoding="utf-8"), _UniqueKeys) or {}
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {file}: not a UTF-8 text file: {error}") from error
    except RecursionError as error:
        raise ConfigError(
            f"--config {file}: not valid YAML: its brackets are nested too deep"
        ) from error
    except (
        yaml.YAMLError,
        ValueError,
    ) as error:  # ValueError: Python's limit for digits of a number
        raise ConfigError(f"--config {file}: not valid YAML: {error}") from error

    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {file}: the file has no keys, such as `seed: 1`, alone or under `train:`"
        )

    values: dict[str, Any] = {}
    problems: list[str] = []
    owners = section_of_field() | {name: old.section for name, old in RENAMED.items()}

    def take(name: str, value: Any) -> None:
        if name in values:
            problems.append(f"the key {name!r} occurs twice, alone and under `{owners[name]}:`")
        if value is not None and value != []:
            values[name] = value

    for section, keys in content.items():
        # a key without its section
        if section in owners and (section not in SECTIONS or not isinstance(keys, dict | None)):
            take(section, keys)
        elif section not in SECTIONS:
            kind, known = ("section", SECTIONS) if isinstance(keys, dict) else ("key", owners)
            problems.append(f"unknown {kind} {section!r}{nearest(str(section), known)}")
        elif not isinstance(keys, dict | None):
            problems.append(f"`{section}:` contains {keys!r} instead of keys with values")
        else:
            for name, value in (keys or {}).items():
                if owners.get(name) == section:
                    take(name, value)
                else:
                    moved = (
                        f"; it belongs under `{owners[name]}:`"
                        if name in owners
                        else nearest(str(name), owners)
                    )
                    problems.append(f"unknown key {name!r} under `{section}:`{moved}")

    if problems:
        listed = (
            problems[0]
            if len(problems) == 1
            else "".join(f"\n  - {problem}" for problem in problems)
        )
        raise ConfigError(f"--config {file}: {listed}")

    return values


# -- help


def _answer(argv: list[str], command: str, description: str) -> None:
    """Print the reply to --help or --version, and exit."""
    if VERSION in argv:
        from lightrft import __version__

        sys.stdout.write(f"lightrft {__version__}\n")
        sys.exit(0)
    for place, token in enumerate(argv):
        if token in HELP or token.startswith("--help="):
            topic = token.partition("=")[2] or next(iter(argv[place + 1 :]), "")
            sys.stdout.write(help_text(command, topic, description))
            sys.exit(0)


def help_text(command: str, topic: str = "", description: str = "") -> str:
    """Return the help of a command: all of its groups by name, or one group, one flag, or `all`
    with their descriptions.
    """
    topic = topic.strip("-").replace("-", "_")
    topic = ALIASES.get(topic, topic)
    read = fields_read(command)
    groups = {
        name: [each for each in _names(name) if each in read]
        for name in SECTIONS
        if name in COMMANDS[command]
    }

    if topic == "all":
        return "\n".join(
            _heading(group) + _help_of_flags(command, names) for group, names in groups.items()
        )
    if topic in groups:
        return _heading(topic) + _help_of_flags(command, groups[topic])
    if topic in read:
        return _help_of_flags(command, [topic])
    if topic in PRESETS:
        return f"--advantage_estimator {topic} sets these flags, unless you set them:\n" + _recipe(
            topic
        )

    near = nearest(topic, {*groups, *read, *PRESETS}).rstrip("?")
    unknown = [f"no group, flag or recipe is called {topic}{near}", ""] if topic else []
    lines = [
        *unknown,
        f"usage: lightrft {command} [--config file.yaml] [--flag value ...]",
        "",
        description.strip(),
        "",
    ]

    for group, names in groups.items():
        lines += [
            _heading(group).rstrip(),
            textwrap.fill(" ".join(names), 118, initial_indent="  ", subsequent_indent="  "),
        ]

    lines += [
        "",
        (
            "--help GROUP explains the flags of a group, --help FLAG a single flag, and --help all"
            " every flag."
        ),
    ]
    lines += ["--version prints the version. Flags of other tools: docs/migrating.md."]
    return "\n".join(lines) + "\n"


def _recipe(name: str) -> str:
    return "".join(f"  --{field} {value}\n" for field, value in recipe(name).items())


def _names(section: str) -> Iterator[str]:
    return (field.name for field in fields(SECTIONS[section]))


def _heading(group: str) -> str:
    return f"{group}: {GROUPS[group]}\n"


def _help_of_flags(command: str, names: Iterable[str]) -> str:
    defaults = Config()
    defaults.expand(DEFAULTS.get(command, {}))
    return "".join(_help_of_flag(name, getattr(defaults, name)) for name in names)


def _help_of_flag(name: str, value: Any) -> str:
    kind = field_types()[name]
    section = SECTIONS[section_of_field()[name]]
    text = ",".join(map(str, value)) if isinstance(value, list) else value
    presets = f" Choices: {', '.join(PRESETS)}." if name == "advantage_estimator" else ""
    end = presets + ("" if value in (None, "", [], False) else f" Default: {text}.")
    meaning = textwrap.fill(
        field_docs(section)[name] + end, 118, initial_indent="      ", subsequent_indent="      "
    )
    return f"  --{name}{_form(kind)}\n{meaning}\n"


def _form(kind: Any) -> str:
    """Return the form of the value after the flag, as --help shows it."""
    arms = (
        [arm for arm in get_args(kind) if arm is not type(None)]
        if type(None) in get_args(kind)
        else [kind]
    )
    if get_origin(arms[0]) is list:
        item = get_args(arms[0])[0]
        return " text ..." if item is Verbatim else f" {item.__name__},..."
    if arms[0] is CommaSeparated:
        return " str,..."
    if get_origin(arms[0]) is Literal:
        return " {" + ",".join(map(str, get_args(arms[0]))) + "}"

    return "" if arms[0] is bool else f" {arms[0].__name__}"


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Return field name -> the text under it in the source of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        before.target.id: " ".join(after.value.value.split())
        for before, after in zip(body, body[1:], strict=False)
        if isinstance(before, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }
