"""Program that generates the rows of a task; tasks.py starts it as a process."""

import json
import os
import random
import sys
from difflib import get_close_matches
from typing import Any

import numpy as np


def main(arguments: str) -> None:
    """Write the rows of a task to the standard output as JSON lines; after a mistake of the user's, its description.

    `arguments` is a JSON object with the name, size, seed and options of the task.
    """
    rows, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # some tasks print
    given = json.loads(arguments)
    try:
        task = _task(given["name"], size=given["size"], seed=given["seed"], **given["options"])
    except (ImportError, TypeError, ValueError, AssertionError) as error:
        rows.write(json.dumps({"problem": str(error) or "its options contradict each other"}) + "\n")
        rows.close()
        return
    for index in range(given["size"]):
        random.seed(given["seed"] + index)  # a task uses these instead of its own
        np.random.seed((given["seed"] + index) % 2**32)
        row = task[index]
        rows.write(json.dumps({name: row[name] for name in ("question", "answer", "metadata")}) + "\n")
    rows.close()


def _task(name: str, **options: Any) -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ImportError(f"it needs {error.name}: pip install reasoning-gym") from error
    known = sorted(reasoning_gym.factory.DATASETS.keys() - {"composite"})
    if name not in known:
        near = get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"tasks are {', '.join(known)}"
        raise ValueError(f"reasoning-gym has no task {name!r}; {hint}")
    return reasoning_gym.create_dataset(name, **options)
