"""Look for the files and packages that flags need before anything heavy is imported, so that a
misspelt path is reported at once.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from lightrft.config import references
from lightrft.config.errors import refuse
from lightrft.config.facts import RunFacts
from lightrft.config.resolve import strategy_name
from lightrft.config.rules import unusable_models
from lightrft.config.sections import Config, fields_read
from lightrft.config.tables import table

NEEDED_PACKAGES = table("config/packages")
CODE_FLAGS = (
    "agent scheduler engine_type advantage_estimator policy_loss rollout_correction".split()
)
"""Flags that may name a function or a class in a file."""


def check_paths(config: Config, command: str) -> None:
    """Raise ConfigError with every model, data set, file of code and package that a flag needs and
    that is not here.

    Names on the hub or of modules, and files that cannot be read, are found later.
    """
    refuse([*unusable_models(RunFacts(config, command)), *missing(config, command)])


def missing(config: Config, command: str) -> Iterator[str]:
    """Yield a sentence for each data set, file of code and package that is not on this machine."""
    for kind in (_missing_data, _missing_code, _missing_run, _missing_packages):
        try:
            yield from kind(config, command)
        except ValueError:  # not a list of names: resolve() says so, with all other problems
            continue


def _missing_data(config: Config, command: str) -> Iterator[str]:
    data = config.data
    sets = [("prompt_data", data.prompt_data), ("pretrain_data", data.pretrain_data)]
    sets += [("eval_data", each.source) for each in references.eval_sources(data.eval_data)]

    for flag, text in sets:
        names = []
        if text and flag in fields_read(command):
            names = [each.name for each in references.data_sources(text)]
        for name in names:
            is_path = ":" not in name and (
                name.startswith(("/", "./", "../", "~"))
                or Path(name).suffix in references.DATA_FILES
            )
            if is_path and not os.path.exists(os.path.expanduser(name)):
                yield (
                    f"--{flag} {name}: neither an existing file or folder nor a hub name"
                    " (owner/name)"
                )


def code_files(config: Config) -> list[tuple[str, str, str]]:
    """Return (flag, name, file) for the user's files of code that a configuration names."""
    section = config.environment
    named = [("reward", term.name) for term in references.reward_terms(config.reward.reward)]
    named += [("environment", section.environment), ("strategy", config.strategy.strategy)]
    named += [("tools", name) for name in section.tools if not name.startswith("mcp:")]
    named += [(flag, getattr(config, flag) or "") for flag in CODE_FLAGS]

    files = [name if name.endswith(".py") else name.rpartition(":")[0] for _, name in named]
    pairs = zip(named, files, strict=True)
    return [(flag, name, file) for (flag, name), file in pairs if file.endswith(".py")]


def _missing_code(config: Config, command: str) -> Iterator[str]:
    for flag, name, file in code_files(config):
        if flag in fields_read(command) and not os.path.isfile(file):
            yield f"--{flag} {name}: no file {Path(file).resolve()}"


def _missing_run(config: Config, command: str) -> Iterator[str]:
    name = config.train.fork_from if "fork_from" in fields_read(command) else ""
    if name and not os.path.isfile(Path(name).expanduser() / "config.yaml"):
        yield f"--fork_from {name:.200}: it is not the folder of a run: it has no config.yaml"


def _missing_packages(config: Config, command: str) -> Iterator[str]:
    run = RunFacts(config, command)
    needs = [
        (flag, "" if run[flag] is True else run[flag], run[flag] and package)
        for flag, package in NEEDED_PACKAGES["flags"].items()
    ]
    named = [("strategy", strategy_name(config.strategy)), ("engine_type", run.engine_type)]
    named += [("optimizer", run.optimizer), *(("report_to", name) for name in run.trackers)]
    needs += [(flag, name, NEEDED_PACKAGES["names"].get(name)) for flag, name in named]
    for name in run.rewards:
        address = run.judge_url if name == references.JUDGE else name
        package = NEEDED_PACKAGES["rewards"].get(address.partition("://")[0])
        needs += [("reward", name, package)]
    named = [("environment", run.environment), *(("tools", name) for name in run.tools)]
    named += [("prompt_data", each.name) for each in references.data_sources(run.prompt_data)]
    for flag, name in named:
        needs += [(flag, name, NEEDED_PACKAGES["prefixes"].get(name.partition(":")[0]))]

    for flag, value, package in needs:
        if package and flag in fields_read(command) and find_spec(package[0]) is None:
            other = NEEDED_PACKAGES["other_ways"].get(package[0], "")
            yield (
                f"{f'--{flag} {value}'.strip()} needs {package[0]}, which is not installed: pip"
                f" install '.[{package[1]}]'{other}"
            )
