"""Translate a script or a configuration of another tool into a configuration of this program.

lightrft migrate train.py                    a script or notebook of TRL or Unsloth; it is not run
lightrft migrate run.sh --ranks 8            a command line of verl, OpenRLHF, TRL or ms-swift
lightrft migrate config.yaml > mine.yaml     a YAML file of axolotl, TRL, verl or ms-swift

The configuration goes to the standard output, with a comment for each name that has no
counterpart. `--ranks` is the number of processes, by which batches of one device are multiplied.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightrft.app.cli import command_parser
from lightrft.config.errors import USER_ERROR, ConfigError
from lightrft.config.sections import Config, aliases, fields_read
from lightrft.extras.compat import command_line
from lightrft.extras.compat.counterparts import Translation, defaults, table, translate
from lightrft.extras.foreign_files import ForeignFile, read


def main(argv: list[str] | None = None) -> None:
    arguments = command_parser("migrate", __doc__).parse_args(argv)
    try:
        sys.stdout.write(migrated(arguments.file, ranks=arguments.ranks))
    except ConfigError as error:
        sys.stderr.write(f"lightrft migrate: {error}\n")
        raise SystemExit(USER_ERROR) from None


def migrated(path: Path, *, ranks: int = 1) -> str:
    """Return the text of a YAML file for `--config`, with comments.

    Raises ConfigError if the file is of no known tool.
    """
    found = read(path)
    translation = _translated(found, ranks)
    notes = translation.notes | found.notes
    flags = _accepted(translation.flags, found.command, notes)
    for name in {"pretrain", "prompt_data"} - flags.keys():
        if not any(f"--{name}" in note for note in notes.values()):
            notes.setdefault(name, f"the file does not say it: write --{name}")
    missing = _defaults(found, translation, ranks)

    title = table(found.tool)["title"]
    lines = [f"# From {path.name} ({title}): lightrft {found.command} --config THIS_FILE"]
    for name, value in flags.items():
        source = ", ".join(dict.fromkeys(translation.sources.get(name, ())))
        comment = f"  # {source}" if source and source != name else ""
        lines.append(_line(name, value) + comment)
    if missing:
        lines += [
            "",
            f"# {title} has these where nothing is written; without them it is another run.",
        ]
        lines += [_line(name, value) for name, value in missing.items() if name not in flags]
    if notes:
        lines += ["", "# What no flag means:"]
        lines += [f"#   {name}: {' '.join(sentence.split())}" for name, sentence in notes.items()]

    return "\n".join(lines) + "\n"


def _translated(found: ForeignFile, ranks: int) -> Translation:
    if found.tool == "openrlhf":
        return _of_openrlhf(found.values)

    result = translate(found.tool, found.values, found.command, ranks=ranks)
    if found.lora:
        adapters = translate("trl", found.lora, found.command, rows="lora")
        result.flags |= adapters.flags
        result.sources |= adapters.sources
        result.notes |= adapters.notes

    return result


def _of_openrlhf(values: Mapping[str, Any]) -> Translation:
    """Translate as the command line does, which understands these flags."""
    tokens = []
    for name, value in values.items():
        words = value if isinstance(value, list) else [] if value is True else [value]
        tokens += [f"--{name}", *map(str, words)]

    config = Config()
    flags, problems = command_line.translate(tokens, config)
    result = Translation()
    for name, words in flags.items():
        parsed = [yaml.safe_load(word) for word in words]
        result.flags[name] = parsed if len(parsed) > 1 else parsed[0] if parsed else True
    for sentence in [*problems, *config.notices]:
        name, *meaning = re.split("[:;] ", sentence.removeprefix("unknown flag "), maxsplit=1)
        result.notes[name.removeprefix("--")] = "".join(meaning)

    return result


def _accepted(flags: Mapping[str, Any], command: str, notes: dict[str, str]) -> dict[str, Any]:
    """Return the flags that the command has, with values that it takes; note the others."""
    kept = {}
    for name, value in flags.items():
        name = aliases().get(name, name)
        try:
            Config().update({name: value})
        except ConfigError as error:
            notes[name] = f"{value}: {error}"
            continue
        if name in fields_read(command):
            kept[name] = value
        else:
            notes[name] = f"{value}: {command} has no such flag"
    return kept


def _defaults(found: ForeignFile, translation: Translation, ranks: int) -> dict[str, Any]:
    """Return the flags that follow from what the tool takes where nothing is written."""
    if found.tool == "openrlhf":
        values = table("openrlhf")["defaults"].items()
        flags = {name: yaml.safe_load(value) for name, value in values if " " not in value}
    else:
        unwritten = defaults(found.tool, found.command).items()
        whole = {name: value for name, value in unwritten if name not in found.notes} | found.values
        flags = translate(found.tool, whole, found.command, ranks=ranks).flags

    missing = {name: value for name, value in flags.items() if name not in translation.flags}
    return _accepted(missing, found.command, {})


def _line(name: str, value: Any) -> str:
    """Return one key of a YAML file with its value, on one line."""
    value = list(value) if isinstance(value, tuple | set) else value
    in_brackets = yaml.safe_dump([value], default_flow_style=True, width=10**6).strip()
    return f"{name}: {in_brackets[1:-1]}"
