"""Tasks of an environment of the package verifiers as rows.

They are named like `verifiers:NAME?select.limit=500&taskset.game=Wordle-v0`. The options are fields
of the environment's own configuration by name: `taskset.*`, and `<role>.*` of an agent, such
as `agent.harness.id`. The options `select.*` choose the tasks.
"""

from collections.abc import Iterator
from typing import Any

from verifiers.v1 import EnvConfig, SelectConfig
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import (
    env_config_type,
    harness_class,
    load_taskset,
    resolve_env_config,
)

from lightrft.config.errors import DataError
from lightrft.config.references import VERIFIERS, task_options
from lightrft.data.columns.values import DataRow
from lightrft.registry import all_kept_alive, kept_alive

TASK = "task"
"""Column with the data of a task."""


def parse(reference: str) -> tuple[EnvConfig, dict[str, Any]]:
    """Return environment and selection of `NAME?option=value&option=value`.

    Values are JSON, or else text. Agents are local processes if no option says where. Raise
    ValueError or ModuleNotFoundError if there is no such environment, if it has no such option, or
    if an agent would run what the model writes on this machine without an option that says so.
    """
    name, written = task_options(reference, VERIFIERS)
    options: dict[str, Any] = {"taskset": {"id": name}, "select": {}}
    for path, value in written:
        *folders, last = path.split(".")
        target = options
        for folder in folders:
            target = target.setdefault(folder, {})
        target[last] = "null" if value is None else value  # null is the name of a harness

    select = options.pop("select")
    every = agent_config_fields(env_config_type(name, options.get("id", ""))())
    roles = [role for role in every if "runtime" not in options.setdefault(role, {})]
    for role in roles:
        options[role]["runtime"] = {"type": "subprocess"}

    config = resolve_env_config(options)
    for role in roles:
        harness = config.agent_harnesses()[role].id
        # Only the user can decide that what the model writes runs on this machine.
        if harness_class(harness).EXECUTES_CODE:
            raise ValueError(
                f"its agent {role} has the harness {harness}, which runs what the model writes:"
                f" choose {role}.harness.id=null, which has no tools of its own, or"
                f" {role}.runtime.type=docker, or subprocess for this machine without protection"
            )

    return config, select


def task_rows(reference: str, flag: str) -> Iterator[DataRow]:
    """Yield a row for each task.

    `input` is the prompt for people, and `task` has its data; an episode makes the task from it
    again. Raise DataError for an environment or a task that cannot be loaded.
    """
    try:
        with kept_alive():
            config, select = parse(reference)
            tasks = load_taskset(config.taskset).select(SelectConfig(**select))
        if not tasks.bounded:
            raise ValueError("it has any number of tasks: add select.limit=500")

        for number, task in enumerate(all_kept_alive(tasks), 1):
            name = (
                task.data.prompt_text
                or task.data.description
                or task.data.name
                or f"task {task.data.idx}"
            )
            yield (
                f"{reference} row {number}",
                {"input": name, TASK: task.data.model_dump(mode="json")},
            )
    except Exception as error:  # the taskset's own code may raise anything
        raise DataError(f"{flag} {reference}: {type(error).__name__}: {error}") from error
