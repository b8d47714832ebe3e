"""Why: a command or a flag on a page is the first thing that a reader tries."""

import re
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Literal, get_args, get_origin

import pytest

from lightrft.app.cli import command_parser, read_command_line
from lightrft.config import COMMANDS, ConfigError, resolve
from lightrft.config.resolve import range_problems
from lightrft.config.sections import aliases, field_types, section_of_field
from lightrft.config.tables import table
from lightrft.config.values import JSONObject
from lightrft.extras.commands import plan
from lightrft.extras.compat import openrlhf
from lightrft.extras.compat.counterparts import names
from lightrft.extras.compat.openrlhf import DOTTED, IGNORED

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]

OTHERS = {*openrlhf.NAMES, *openrlhf.EQUIVALENT_FLAGS, *openrlhf.SPECIAL, *openrlhf.IGNORED}
OTHERS |= openrlhf.TRACKER_SWITCHES.keys()
OF_TRL = names("trl").keys() - section_of_field().keys() - aliases().keys() - OTHERS
"""Flags of TRL, which are answered with what to write instead."""

OTHER_PROGRAMS = {
    "pip",
    "git",
    "cat",
    "head",
    "source",
    "echo",
    "cd",
    "mkdocs",
    "mpirun",
    "docker",
    "kubectl",
    "sky",
    "srun",
}
"""Programs that are not part of lightrft."""

OTHER_FLAGS = {
    "--help",
    "--config",
    "--version",  # answered before the configuration is read
    "--nproc-per-node",
    "--nproc_per_node",
    "--max-restarts",
    "--rdzv-conf",
    "--rdzv-backend",
    "--no-python",
    "--standalone",
    # of torchrun and Slurm
    "--local-addr",
    "--ntasks-per-node",
    "--gpus-per-node",
    "--kill-on-bad-exit",
    "--rdzv-endpoint",
    "--shutdown-timeout",
    "--gpus-per-task",
    "--no-deps",
    "--only-binary",
    "--python-version",  # of torchrun, Slurm and pip
    "--out",
    "--source",
    "--seed",  # of the scripts
}
"""Flags that are printed alone and belong to a program that reads no configuration."""

REFUSED = {
    "--async_train",
    "--agent_func_path",
    "--no_advantage_std_norm",
    "--use_ms",
    "--dynamic_filtering_reward_range",
    "--normalize_reward_for_critic",
}
"""Flags that docs/migrating.md lists as refused."""

MEASURED = {"benchmarks.md", "gpu_check.md", "scaling.md"}
"""Pages about the scripts that measure; their flags are looked up in the scripts."""

PLACEHOLDER = re.compile(r"-?[A-Z][A-Z_/,]*|c|\.\.\.|<.*>")
MESSAGE = re.compile(r"[;:] | needs | does not | has nothing | is short for ")
"""Pattern that tells a printed error message from flags."""


# -- whole commands


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in re.findall(
            r"^```bash\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE
        ):
            without_documents = re.sub(r"<<'(\w+)'\n.*?\n\1\n", "\n", block, flags=re.DOTALL)
            variables = {}
            for line in re.sub(r"\\\n\s*", " ", without_documents).splitlines():
                if given := re.fullmatch(r"([a-z]+)=\"(.*)\"", line):
                    variables[given[1]] = given[2]
                elif line.strip() and not line.startswith("#"):
                    yield page.name, Template(line).safe_substitute(variables).strip()


COMMANDS_OF_PAGES = sorted(set(commands()))


@pytest.mark.parametrize(("page", "line"), COMMANDS_OF_PAGES, ids=lambda value: value[:60])
def test_a_printed_command_is_accepted(page, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(
        line.replace("--config ...", "--config configs/quickstart.yaml"), comments=True
    )
    settings = {}
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, settings[name] = words.pop(0).partition("=")
    check(words, settings)


def check(words: list[str], settings: dict[str, str]) -> None:
    """Fail if the program that `words` start would refuse them."""
    world_size = int(
        next(
            (
                after
                for word, after in zip(words, words[1:], strict=False)
                if word.endswith("per-node")
            ),
            1,
        )
    )

    if "-m" in words and words[words.index("-m") + 1] == "lightrft":
        words = words[words.index("-m") + 1 :]
    script = next((word for word in words if re.fullmatch(r"scripts/[\w/]+\.(sh|py)", word)), "")
    module = next((word for word in words if re.match(r"(lightrft\.\w+|scripts)\.\w+$", word)), "")

    if script.startswith("scripts/run_grpo") or script.endswith("launch.sh"):
        after = words[words.index(script) + 1 :]
        if script.endswith("launch.sh"):
            return check_command(after[0], after[1:], world_size=8)
        recipe = re.search(
            r"configs/[\w.]+\.yaml", settings.get("CONFIG") or (ROOT / script).read_text()
        )
        data = ["--prompt_data=d.jsonl", "--eval_data=d.jsonl"]
        check_command("train_ppo", ["--config", recipe.group(), *data, *after], world_size=8)
    elif script or module.startswith("scripts"):
        path = ROOT / (script or module.replace(".", "/") + ".py")
        program = "".join(file.read_text() for file in {path, *path.parent.glob("*.py")})
        missing = [
            word
            for word in words[words.index(script or module) :]
            if word.startswith("--") and word.partition("=")[0] not in program
        ]
        assert path.exists() and not missing, f"{path.name} has no {missing}"
    elif module:
        assert find_spec(module)
    elif words[0] == "lightrft":
        check_command(words[1], words[2:], world_size=world_size)
    else:
        assert words[0] in OTHER_PROGRAMS, (
            f"{words[0]} is neither a program of this project nor in OTHER_PROGRAMS"
        )


def check_command(command: str, arguments: list[str], *, world_size: int) -> None:
    if "..." in arguments:
        arguments.remove("...")
    if command in ("plan", "bench"):
        options, arguments = plan._parser().parse_known_args(
            [*arguments, *(["--ranks=1"] if command == "bench" else [])]
        )
        command, world_size = options.command, options.ranks if command == "plan" else world_size
        arguments = arguments if arguments[0].startswith("-") else ["--config", *arguments]

    command = command.replace("selfcheck", "doctor")
    if command in ("check", "tune"):
        parser_of(command).parse_known_args(arguments)
    elif command == "migrate":
        parser_of(command).parse_args([word for word in arguments if word != ">"][:-1])
    elif command in table("app/cli/arguments"):
        positional = (
            ["checkpoint", "folder"] if command == "export" and arguments[0].startswith("-") else []
        )
        parser_of(command).parse_args([*arguments, *positional])
    else:
        assert command in COMMANDS
        resolve(without_files(read_command_line(arguments, command)), command, world_size)


def without_files(config):
    """Return the configuration with names of the hub in place of local models that do not exist
    here.
    """
    for name in ("pretrain", "critic_pretrain", "teacher_pretrain"):
        if getattr(config, name):
            setattr(config.model, name, "some/model")
    if not config.model.pretrain and not config.model.reward_pretrain:
        config.model.pretrain = "some/model"
    return config


# -- flags in the text


def codes() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
            yield page.name, " ".join(code.split())


FLAGS_OF_PAGES = sorted(
    # A page without commands of scripts stands for all other such pages with the same words.
    {
        (page if page in MEASURED else "", code): (page, code)
        for page, code in codes()
        if code.startswith("--") and not MESSAGE.search(code)
    }.values()
)
INLINE_COMMANDS = sorted(
    {
        (page, code)
        for page, code in codes()
        if re.match(
            r"(lightrft \w+|torchrun .*-m|python -m lightrft|bash scripts/\S+|python scripts/\S+)"
            r" .*--",
            code,
        )
    }
)


@pytest.mark.parametrize(("page", "code"), FLAGS_OF_PAGES, ids=lambda value: value[:60])
def test_printed_flags_and_their_values_are_accepted(page, code):
    groups: list[list[str]] = []
    for word in shlex.split(code):
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            groups.append([name, *([value] if equals else [])])
        elif groups[-1][0] not in OTHER_FLAGS:
            groups[-1].append(word)

    if (
        page in MEASURED
        and not all(flag in OTHER_FLAGS for flag, *_ in groups)
        and not known(groups)
    ):
        scripts = "".join(
            path.read_text()
            for folder in ("scripts", "scripts/bench")
            for path in (ROOT / folder).glob("*.py")
        )
        missing = [flag for flag, *_ in groups if f'"{flag}"' not in scripts]
        assert not missing, f"no script has {missing}"
    elif code.endswith("*"):
        assert any(f"--{name}".startswith(code.rstrip("*")) for name in IGNORED)
    elif not all(flag in OTHER_FLAGS or flag in options_of_tools() for flag, *_ in groups):
        refused = [
            flag for flag, *_ in groups if flag in REFUSED or flag.removeprefix("--") in OF_TRL
        ]
        words = [word for flag, *values in groups for word in (flag, *values_of(flag, values))]
        try:
            config = read_command_line(words)
        except ConfigError as error:
            assert refused and all(flag in str(error) for flag in refused), error
            return
        assert not refused
        assert words != shlex.split(code) or range_problems(config, config.written) == []


@pytest.mark.parametrize(("page", "code"), INLINE_COMMANDS, ids=lambda value: value[:60])
def test_a_command_in_the_text_is_accepted(page, code, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [word for word in shlex.split(code) if word != "..."]
    if "--help" not in words:
        check(
            ["configs/quickstart.yaml" if PLACEHOLDER.fullmatch(word) else word for word in words],
            {},
        )


def known(groups: list[list[str]]) -> bool:
    return all(
        flag.removeprefix("--").removeprefix("no_") in section_of_field() for flag, *_ in groups
    )


def options_of_tools() -> set[str]:
    """Return the flags of the commands that read no configuration."""
    names = (
        "doctor",
        "export",
        "plan",
        "bundle",
        "replay",
        "forecast",
        "test_rewards",
        "tune",
        "curate",
    )
    return {
        option
        for name in names
        for action in parser_of(name)._actions
        for option in action.option_strings
    }


def parser_of(command: str) -> ArgumentParser:
    """Return what reads the arguments of a command that reads no configuration."""
    return plan._parser() if command == "plan" else command_parser(command, None)


def values_of(flag: str, values: list[str]) -> list[str]:
    """Return values for placeholders such as N or FOLDER, the first of `a|b`, or a value of our
    own.
    """
    kind = bool if current(flag) in openrlhf.TRACKER_SWITCHES else field_types().get(current(flag))
    if not values and kind is not bool:
        values = [] if kind is None else ["N"]

    example = "1" if "int" in str(kind) or "float" in str(kind) or kind is None else "name"
    if get_origin(kind) is Literal:
        example = str(get_args(kind)[0])
    if kind is JSONObject:
        example = "{}"
    examples = {"FILE": "README.md", "-C": f"-{example}"}
    examples["LEAST,MOST"] = f"{example},{example}"

    return [
        examples.get(value, example) if PLACEHOLDER.fullmatch(value) else value.split("|")[0]
        for value in values
    ]


def current(flag: str) -> str:
    """Return the name of the field that a flag sets, also for a flag of another tool."""
    name = flag.removeprefix("--")
    name = DOTTED.get(name, name)
    name = openrlhf.NAMES.get(name, name)
    return aliases().get(name, name)


def test_extras_are_those_of_this_folder():
    """`pip install lightrft[...]` would install another project of that name."""
    files = [*PAGES, *(ROOT / "lightrft").rglob("*.py"), *(ROOT / "scripts").rglob("*.*")]
    assert [
        path.name
        for path in files
        if path.suffix in (".md", ".py", ".sh") and "lightrft[" in path.read_text()
    ] == []


# -- the tests themselves


@pytest.mark.parametrize(
    "line",
    [
        "lightrft train_ppo --tols calculator",
        "lightrft export a",
        "python scripts/quickstart.py --out x",
        (
            "torchrun --nproc-per-node 8 -m lightrft train_ppo --config configs/quickstart.yaml"
            " --tp_size 3"
        ),
        "unknown --flag",
    ],
)
def test_a_wrong_command_is_found(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((ConfigError, SystemExit, AssertionError, FileNotFoundError)):
        check(shlex.split(line), {})


def test_the_pages_have_commands_and_flags():
    assert len(COMMANDS_OF_PAGES) > 30 and len(FLAGS_OF_PAGES) > 150 and len(INLINE_COMMANDS) > 10
