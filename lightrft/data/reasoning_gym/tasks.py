"""Tasks of the package reasoning-gym as data.

They are named like `reasoning_gym:chain_sum?size=500&seed=1&max_terms=4`.
"""

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from lightrft.config.errors import DataError
from lightrft.config.references import REASONING_GYM, task_options
from lightrft.data.columns.values import DataRow

SIZE = 500
"""Number of rows of a task without `size`."""
PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from lightrft.data.reasoning_gym.generator import main;"
    " main(sys.argv[1])"
)


@dataclass(frozen=True, slots=True)
class ReasoningTask:
    """A task with options.

    Row i is a function of `seed + i`, so tasks with near seeds share rows.
    """

    name: str
    size: int
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task itself; its scorer may need them too."""

    @classmethod
    def parse(cls, reference: str, split: str) -> Self:
        """Read `reasoning_gym:NAME?option=value&option=value`; values are JSON, or else text.

        Without `seed`, the seed is derived from the split. Raise DataError for a size or a seed
        that is not a number.
        """
        name, written = task_options(reference, REASONING_GYM)
        options = dict(written)
        size = options.pop("size", SIZE)
        seed = options.pop("seed", zlib.crc32(split.encode()))
        for key, value, least in (("size", size, 1), ("seed", seed, 0)):
            if type(value) is not int or value < least:
                raise DataError(
                    f"{reference}: {key}={value} is not a whole number of at least {least}"
                )

        return cls(name, size, seed, options)

    def shares_rows(self, other: Self) -> bool:
        """Return True if both have a row in common because of the seeds."""
        near = self.seed < other.seed + other.size and other.seed < self.seed + self.size
        return near and (self.name, self.options) == (other.name, other.options)


def task_rows(reference: str, split: str, flag: str) -> Iterator[DataRow]:
    """Yield the rows of a task.

    They have `input` and `question`, `label` and `answer` (None without a single right one), and
    `metadata`. They are generated in a process of their own, where sets have one order and the
    global random numbers a seed: in this process, some tasks would differ between ranks. Raise
    DataError for an unknown task or option.
    """
    task = ReasoningTask.parse(reference, split)
    program = PROGRAM.format(path=[str(folder) for folder in sys.path])
    arguments = json.dumps(asdict(task))

    command = [sys.executable, "-c", program, arguments]
    # With one hash seed, sets have the same order in every process.
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        try:
            for number, line in enumerate(process.stdout or (), 1):
                row = json.loads(line)
                if "problem" in row:
                    raise DataError(f"{flag} {reference}: {row['problem']}")
                where = f"{REASONING_GYM}{task.name} row {number}"
                question = row["question"]
                answer = row["answer"]
                yield where, {"input": question, "label": answer, "options": task.options, **row}

            if process.wait():
                raise DataError(
                    f"{flag} {reference}: its generator ended with exit code {process.returncode};"
                    " see above"
                )
        finally:
            process.kill()


def check_held_out(
    training: list[str], held_out: list[str], *, split: str, eval_split: str
) -> None:
    """Raise DataError if a task of the held-out data has rows of the training data."""
    tasks = [
        ReasoningTask.parse(name, split) for name in training if name.startswith(REASONING_GYM)
    ]
    for name in held_out:
        task = ReasoningTask.parse(name, eval_split) if name.startswith(REASONING_GYM) else None
        shared = [other for other in tasks if task and task.shares_rows(other)]
        if shared:
            raise DataError(
                f"--eval_data {name}: some of its rows are in --prompt_data, because row i of a"
                f" task is made from seed + i; set seed={shared[0].seed + shared[0].size}, or leave"
                " seed out of both"
            )
