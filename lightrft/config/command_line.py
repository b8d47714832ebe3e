"""Read the configuration from the command line and the YAML file.

    torchrun -m lightrft.cli.train_ppo --config configs/quickstart.yaml --actor_learning_rate 1e-3

The file gives defaults, flags override it. Nothing heavy is imported here, so that a mistake is reported at once.
"""

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml

from lightrft.config.commands import COMMANDS, fields_read
from lightrft.config.errors import ConfigError
from lightrft.config.other_tools import SUGGESTED, translate_flags
from lightrft.config.presets import PRESETS, recipe
from lightrft.config.renamed import RENAMED
from lightrft.config.sections import SECTIONS, Config, field_types, section_of_field
from lightrft.config.values import nearest

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
HELP, VERSION = ("-h", "--help"), "--version"


def parse(argv: Sequence[str] | None = None, command: str = "train_ppo", description: str = "") -> Config:
    """Return the configuration of `--config file.yaml` and flags, not yet resolved; see resolve().

    Raises ConfigError for names that do not exist and values of the wrong type, all of one source in one message. `--help` and
    `--version` print and exit.
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
    if values.keys() & {"strategy", "fsdp"}:  # two forms of one choice: a flag of either replaces the value in a file
        config.strategy.forget("strategy", "fsdp")
    config.update(values, source="--")
    return config


def load(file: str | Path) -> Config:
    """Return the configuration of a YAML file, not yet resolved."""
    return parse(["--config", str(file)])


def _values_of_flags(arguments: list[str], problems: list[str]) -> dict[str, Any]:
    """Return field name -> value; raise ConfigError with the unknown flags, and with the `problems` that were found before."""
    sections = section_of_field()
    names = [token.partition("=")[0] for token in arguments if token.startswith("--")]
    switches = {f"--no_{name}" for name, kind in field_types().items() if kind is bool}
    flags = {f"--{name}" for name in sections} | switches
    before = {f"--{name}" for name in RENAMED} | {f"--no_{name}" for name, old in RENAMED.items() if old.kind is bool}
    unknown = [f"unknown flag {name}{_suggestion(name, flags - switches)}" for name in names if name not in flags | before]
    if unknown or problems:
        raise ConfigError(f"{'; '.join([*unknown, *problems])}. All flags: --help all; of other tools: docs/migrating.md")
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, kind in (field_types() | {name: old.kind for name, old in RENAMED.items()}).items():
        if kind is bool:
            parser.add_argument(f"--{name}", nargs="?", const=True)
            parser.add_argument(f"--no_{name}", action="store_const", const=False, dest=name)
        else:
            parser.add_argument(f"--{name}", nargs="*" if get_origin(kind) is list else None)
    values, stray = parser.parse_known_args(arguments)
    if stray:
        raise ConfigError(f"unexpected {' '.join(stray)}: a value must follow its --flag. All flags: --help all")
    return vars(values)


def _suggestion(name: str, flags: set[str]) -> str:
    word = SUGGESTED.get(name.removeprefix("--"))
    return f"; the flag here is --{word}" if word else nearest(name, flags).rstrip("?")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.rstrip('.')}. All flags: --help all")


# -- files


def _split_config_flag(argv: list[str]) -> tuple[list[str], list[str]]:
    files, rest = [], []
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
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _values_of_file(file: str) -> dict[str, Any]:
    """Return field name -> value of a YAML file of sections."""
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
        raise ConfigError(f"--config {file}: the file has no sections, such as `train:` with `seed: 1` under it")
    values: dict[str, Any] = {}
    owners = section_of_field() | {name: old.section for name, old in RENAMED.items()}
    for section, keys in content.items():
        if section not in SECTIONS:
            moved = f"; it belongs under `{owners[section]}:`" if section in owners else nearest(str(section), SECTIONS)
            raise ConfigError(f"--config {file}: unknown section {section!r}{moved}")
        if not isinstance(keys, dict | None):
            raise ConfigError(f"--config {file}: `{section}:` contains {keys!r} instead of keys with values")
        for name, value in (keys or {}).items():
            if owners.get(name) != section:
                moved = f"; it belongs under `{owners[name]}:`" if name in owners else nearest(str(name), owners)
                raise ConfigError(f"--config {file}: unknown key {name!r} under `{section}:`{moved}")
            if value is not None and value != []:
                values[name] = value
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
    """Return the help of a command: all of its groups by name, or one group, one flag, or `all` with their descriptions."""
    topic = topic.strip("-").replace("-", "_")
    read = fields_read(command)
    groups = {name: [each for each in _names(name) if each in read] for name in SECTIONS if name in COMMANDS[command]}
    if topic == "all":
        return "\n".join(_heading(group) + "".join(map(_help_of_flag, names)) for group, names in groups.items())
    if topic in groups:
        return _heading(topic) + "".join(map(_help_of_flag, groups[topic]))
    if topic in read:
        return _help_of_flag(topic)
    if topic in PRESETS:
        return f"--advantage_estimator {topic} sets these flags, unless you set them:\n" + _recipe(topic)
    lines = [f"usage: lightrft {command} [--config file.yaml] [--flag value ...]", "", description.strip(), ""]
    for group, names in groups.items():
        lines += [_heading(group).rstrip(), textwrap.fill(" ".join(names), 118, initial_indent="  ", subsequent_indent="  ")]
    lines += ["", "--help GROUP explains the flags of a group, --help FLAG a single flag, and --help all every flag."]
    lines += ["--version prints the version. Flags of other tools: docs/migrating.md."]
    return "\n".join(lines) + "\n"


def _recipe(name: str) -> str:
    return "".join(f"  --{field} {value}\n" for field, value in recipe(name).items())


def _names(section: str) -> Iterator[str]:
    return (field.name for field in fields(SECTIONS[section]))


def _heading(group: str) -> str:
    return f"{group}: {GROUPS[group]}\n"


def _help_of_flag(name: str) -> str:
    kind, section = field_types()[name], SECTIONS[section_of_field()[name]]
    default = next(field for field in fields(section) if field.name == name)
    value = default.default if default.default is not MISSING else default.default_factory()  # type: ignore[misc]
    text = " ".join(map(str, value)) if isinstance(value, list) else value
    presets = f" Choices: {', '.join(PRESETS)}." if name == "advantage_estimator" else ""
    end = presets + ("" if value in (None, "", [], False) else f" Default: {text}.")
    meaning = textwrap.fill(field_docs(section)[name] + end, 118, initial_indent="      ", subsequent_indent="      ")
    return f"  --{name}{_form(kind)}\n{meaning}\n"


def _form(kind: Any) -> str:
    """Return the form of the value after the flag, as --help shows it."""
    arms = [arm for arm in get_args(kind) if arm is not type(None)] if type(None) in get_args(kind) else [kind]
    if get_origin(arms[0]) is list:
        return f" {get_args(arms[0])[0].__name__} ..."
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
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
