"""Look for the files that flags name before anything heavy is imported, so that a misspelt path is
reported at once.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from lightrft.config.errors import refuse
from lightrft.config.facts import RunFacts
from lightrft.config.references import data_sources, eval_sources, reward_terms
from lightrft.config.rules import unusable_models
from lightrft.config.sections import Config, fields_read
from lightrft.samples import DATA_FILES


def check_paths(config: Config, command: str) -> None:
    """Raise ConfigError with every model, data set and file of code that is not where a flag says.

    Names on the hub or of modules, and files that cannot be read, are found later.
    """
    try:
        problems = [
            *unusable_models(RunFacts(config, command)),
            *_missing_data(config, command),
            *_missing_code(config, command),
            *_missing_run(config, command),
        ]
    except ValueError:  # not a list of names: validate() says so, with all other problems
        return

    refuse(problems)


def _missing_data(config: Config, command: str) -> Iterator[str]:
    data = config.data
    sets = [("prompt_data", data.prompt_data), ("pretrain_data", data.pretrain_data)]
    sets += [("eval_data", each.source) for each in eval_sources(data.eval_data)]

    for flag, text in sets:
        names = []
        if text and flag in fields_read(command):
            names = [each.name for each in data_sources(text)]
        for name in names:
            is_path = ":" not in name and (
                name.startswith(("/", "./", "../", "~")) or Path(name).suffix in DATA_FILES
            )
            if is_path and not os.path.exists(os.path.expanduser(name)):
                yield (
                    f"--{flag} {name}: neither an existing file or folder nor a hub name"
                    " (owner/name)"
                )


def code_files(config: Config) -> list[tuple[str, str, str]]:
    """Return (flag, name, file) for the user's files of code that a configuration names."""
    environment = config.environment
    named = [("reward", term.name) for term in reward_terms(config.reward.reward)]
    named += [("environment", environment.environment), ("agent", environment.agent)]
    named += [("tools", name) for name in environment.tools if not name.startswith("mcp:")]
    named += [("strategy", config.strategy.strategy)]
    of_algorithm = ("advantage_estimator", "policy_loss", "rollout_correction")
    named += [(flag, getattr(config, flag) or "") for flag in of_algorithm]

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
