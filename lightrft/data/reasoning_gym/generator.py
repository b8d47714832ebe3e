"""Program that generates the rows of a task; tasks.py starts it as a process."""

import json
import os
import random
import sys
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import numpy as np


def main(arguments: str) -> None:
    """Write the rows of a task to the standard output as JSON lines.

    If the user made a mistake, it writes what is wrong instead. `arguments` is a JSON object with
    the name, size, seed and options of the task.
    """
    rows = os.fdopen(os.dup(1), "w")  # some tasks print
    sys.stdout = sys.stderr

    settings = json.loads(arguments)
    try:
        task = _task(
            settings["name"], size=settings["size"], seed=settings["seed"], **settings["options"]
        )
    except (ImportError, TypeError, ValueError, AssertionError) as error:
        rows.write(
            json.dumps({"problem": str(error) or "its options contradict each other"}) + "\n"
        )
        rows.close()
        return

    for index in range(settings["size"]):
        random.seed(settings["seed"] + index)  # a task uses these instead of its own
        np.random.seed((settings["seed"] + index) % 2**32)
        row = task[index]
        rows.write(
            json.dumps({name: row[name] for name in ("question", "answer", "metadata")}) + "\n"
        )

    rows.close()


def _task(name: str, **options: Any) -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ImportError(f"it needs {error.name}: pip install reasoning-gym") from error

    tasks = sorted(reasoning_gym.factory.DATASETS.keys() - {"composite"})
    if name not in tasks:
        near = get_close_matches(name, tasks, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"tasks are {', '.join(tasks)}"
        raise ValueError(f"reasoning-gym has no task {name!r}; {hint}")

    option_names = [each.name for each in fields(reasoning_gym.factory.DATASETS[name][1])]
    if unknown := sorted(options.keys() - set(option_names)):
        raise ValueError(
            f"the task has no option {unknown[0]!r}; its options are {', '.join(option_names)}"
        )

    return reasoning_gym.create_dataset(name, **options)
