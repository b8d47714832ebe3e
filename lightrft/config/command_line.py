"""Read the configuration from the command line and the YAML file.

    torchrun -m lightrft train_ppo --config configs/quickstart.yaml --learning_rate 1e-3

The file gives defaults, flags override it. Nothing heavy is imported here, so that a mistake is
reported at once.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from lightrft.config.errors import ConfigError
from lightrft.config.presets import COMMAND_DEFAULTS, PRESETS, recipe
from lightrft.config.sections import (
    COMMANDS,
    SECTIONS,
    Config,
    aliases,
    field_types,
    fields_read,
    section_of_field,
)
from lightrft.config.tables import table
from lightrft.config.values import CommaSeparated, JSONObject, Verbatim, nearest

Flags = dict[str, list[str]]
"""Flag, without dashes -> the words after it."""
ESSENTIAL: list[str] = table("config/presets")["essential"]
"""Flags that most runs set; --help begins with them."""
HELP = ("-h", "--help")
HELP_END = """
--help GROUP explains the flags of a group, --help WORD those with the word in their names, and
--help all every flag.
--version prints the version. Flags of other tools: docs/migrating.md.
"""
VERSION = "--version"


def group_flags(tokens: Sequence[str]) -> Flags:
    """Return the flags of a command line, the last one of each name.

    `--eps-clip=1` and `--eps_clip 1` are the same. Raises ConfigError for a word before the first
    flag.
    """
    flags: Flags = {}
    words = None
    for token in tokens:
        if token.startswith("--"):
            name, equals, value = token.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            words = [value] if equals else []
            flags.pop(name, None)  # what is written last wins, over --no_name too
            flags[name] = words
        elif words is not None:
            words.append(token)
        else:
            raise _misplaced(token)

    return flags


def _as_they_are(tokens: list[str], config: Config) -> tuple[Flags, list[str]]:
    return group_flags(tokens), []


def parse(
    argv: Sequence[str] | None = None,
    command: str = "train_ppo",
    description: str = "",
    *,
    read_flags: Callable[[list[str], Config], tuple[Flags, list[str]]] = _as_they_are,
) -> Config:
    """Return the configuration of `--config file.yaml` and flags, not yet resolved; see resolve().

    `read_flags` translates names that are no fields in the command line, as extras/compat
    does, and returns sentences about flags without a translation. It may add to the configuration's
    notices.

    Raises ConfigError for names that do not exist and values of the wrong type, all of one source
    in one message. `--help` and `--version` print and exit.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    _answer(argv, command, description)
    files, tokens = _split_config_flag(argv)

    config = Config()
    for file in files:
        source = f"--config {file}: "
        config.update(_values_of_keys(_content(file), source), source)

    values = _values_of_flags(*read_flags(tokens, config))
    # two forms of one choice: a flag of either replaces the value in a file
    if values.keys() & {"strategy", "fsdp"}:
        config.strategy.forget("strategy", "fsdp")
    config.update(values, source="--")

    return config


def load(file: str | Path) -> Config:
    """Return the configuration of a YAML file, not yet resolved."""
    return parse(["--config", str(file)])


def _values_of_flags(flags: Flags, problems: list[str]) -> dict[str, Any]:
    """Return field name -> value. Raises ConfigError with the unknown flags, and with the
    `problems` that were found before.
    """
    types = field_types() | {alias: field_types()[name] for alias, name in aliases().items()}
    switches = {f"no_{name}": name for name, kind in types.items() if kind is bool}
    unknown = [
        f"unknown flag --{name}{nearest(f'--{name}', (f'--{each}' for each in types)).rstrip('?')}"
        for name in flags
        if name not in types and name not in switches
    ]

    if found := [*unknown, *problems]:
        short = len(found) < 4
        listed = "; ".join(found) if short else "".join(f"\n  - {problem}" for problem in found)
        raise ConfigError(f"{listed}. All flags: --help all; of other tools: docs/migrating.md")

    values: dict[str, Any] = {}
    for name, words in flags.items():
        if name in switches:
            values[switches[name]] = False
            if words:
                raise _misplaced(*words)
        else:
            values[name] = value_of_words(name, types[name], words)

    return values


def value_of_words(name: str, kind: Any, words: list[str]) -> Any:
    """Return the words after a flag as one value; a switch may have none.

    Raises ConfigError for too few or too many words.
    """
    if get_origin(kind) is list:
        return words
    if kind is bool and not words:
        return True
    if not words:
        raise ConfigError(f"--{name} needs a value: --help {name} describes it")
    if kind is CommaSeparated:
        return words
    if words[1:]:
        raise _misplaced(*words[1:])
    return words[0]


def _misplaced(*words: str) -> ConfigError:
    return ConfigError(
        f"unexpected {' '.join(words)}: a value must follow its --flag. All flags: --help all"
    )


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
    """Loader that refuses duplicate keys of a mapping. YAML would keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice", node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


def _content(file: str) -> dict[Any, Any]:
    """Return the keys of a YAML file, under sections or alone."""
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
    except (yaml.YAMLError, ValueError) as error:  # Python has a limit for the digits of a number
        raise ConfigError(f"--config {file}: not valid YAML: {error}") from error

    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {file}: the file has no keys, such as `seed: 1`, alone or under `train:`"
        )
    return content


def _values_of_keys(content: dict[Any, Any], source: str) -> dict[str, Any]:
    """Return field name -> value. Raises ConfigError for keys that do not exist, or twice."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    owners = section_of_field()
    owners = owners | {alias: owners[name] for alias, name in aliases().items()}

    def take(name: str, value: Any) -> None:
        if name in values:
            problems.append(f"the key {name!r} occurs twice, alone and under `{owners[name]}:`")
        if value is not None and value != []:
            values[name] = value

    for section, keys in content.items():
        # a key without a section
        if section in owners and (section not in SECTIONS or not isinstance(keys, dict | None)):
            take(section, keys)
        elif section not in SECTIONS:
            kind, names = ("section", SECTIONS) if isinstance(keys, dict) else ("key", owners)
            problems.append(f"unknown {kind} {section!r}{nearest(str(section), names)}")
        elif not isinstance(keys, dict | None):
            problems.append(f"`{section}:` contains {keys!r} instead of keys with values")
        else:
            for name, value in (keys or {}).items():
                if owners.get(name) == section:
                    take(name, value)
                    continue
                hint = nearest(str(name), owners)
                if name in owners:
                    hint = f"; it belongs under `{owners[name]}:`"
                problems.append(f"unknown key {name!r} under `{section}:`{hint}")

    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(source + (problems[0] if len(problems) == 1 else listed))

    return values


# -- help


def _answer(argv: list[str], command: str, description: str) -> None:
    """Print the reply to --help or --version, and exit."""
    if VERSION in argv:
        from lightrft import __version__

        sys.stdout.write(f"lightrft {__version__}\n")
        sys.exit(0)
    topic = _topic(argv)
    if topic is not None:
        sys.stdout.write(help_text(command, topic, description))
        sys.exit(0)


def answer_word(argv: Sequence[str] | None, command: str) -> None:
    """Print the reply to `--help WORD` about the flags of a command, and exit; else return.

    This is for a program that passes flags on to `command`, or to another one that it names.
    """
    argv = sys.argv[1:] if argv is None else argv
    if topic := _topic(argv):
        named = next((word for word in argv if word in COMMANDS), command)
        sys.stdout.write(help_text(named, topic))
        sys.exit(0)


def _topic(argv: Sequence[str]) -> str | None:
    """Return the word after --help, empty if there is none; None without --help."""
    for index, token in enumerate(argv):
        if token in HELP or token.startswith("--help="):
            return token.partition("=")[2] or next(iter(argv[index + 1 :]), "")
    return None


def help_text(command: str, topic: str = "", description: str = "") -> str:
    """Return the help of a command: the names of all flags by group, or the descriptions of one
    group, one flag, or `all`.
    """
    topic = topic.strip("-").replace("-", "_")
    topic = aliases().get(topic, topic)
    read = fields_read(command)
    groups = {
        name: [each.name for each in fields(section) if each.name in read]
        for name, section in SECTIONS.items()
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
        lines = [f"--advantage_estimator {topic} sets these flags, unless you set them:"]
        lines += [f"  --{name} {value}" for name, value in recipe(topic).items()]
        return "\n".join([*lines, ""])

    if topic and (alike := [name for name in sorted(read) if topic in name]):
        return _help_of_flags(command, alike)

    near = nearest(topic, {*groups, *read, *PRESETS}).rstrip("?")
    unknown = [f"no group, flag or recipe is called {topic}{near}", ""] if topic else []
    lines = [
        *unknown,
        f"usage: lightrft {command} [--config file.yaml] [--flag value ...]",
        "",
        description.strip(),
        "",
        *(_first_sentence(name) for name in ESSENTIAL if name in read),
        "",
    ]

    for group, names in groups.items():
        lines += [
            _heading(group).rstrip(),
            textwrap.fill(" ".join(names), 118, initial_indent="  ", subsequent_indent="  "),
        ]

    return "\n".join([*lines, HELP_END])


def _first_sentence(name: str) -> str:
    """Return a line about a flag that most runs set."""
    meaning = field_docs(SECTIONS[section_of_field()[name]])[name]
    first = re.split(r"(?<=\w[.:;,]) ", meaning)[0].rstrip(".:;,")
    return f"  --{name:<22} {textwrap.shorten(first, 92, placeholder=' ...')}"


def _heading(group: str) -> str:
    return f"{group}: {SECTIONS[group].__doc__}\n"


def _help_of_flags(command: str, names: Iterable[str]) -> str:
    defaults = Config()
    defaults.expand(COMMAND_DEFAULTS.get(command, {}))
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
    if type(None) in get_args(kind):
        arms = [arm for arm in get_args(kind) if arm is not type(None)]
    else:
        arms = [kind]
    if get_origin(arms[0]) is list:
        item = get_args(arms[0])[0]
        return " text ..." if item is Verbatim else f" {item.__name__},..."
    if arms[0] is CommaSeparated:
        return " str,..."
    if arms[0] is JSONObject:
        return " {...}"
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
