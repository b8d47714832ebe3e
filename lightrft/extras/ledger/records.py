"""What a ledger says of each row of the data: its groups, as ledger.sqlite has them."""

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

LEDGER_FILE = "ledger.sqlite"


class Draw(NamedTuple):
    """One group of a row: the sums over its responses."""

    step: int
    row: int
    responses: int
    right: int
    """Number of responses with a reward above 1/2."""
    reward: float
    squares: float
    """Sum of the squares of the rewards."""
    tokens: int
    truncated: int
    answers: str
    """JSON object: answer -> number of responses that give it; empty if the reward reads none."""

    @property
    def has_signal(self) -> bool:
        """Return whether the rewards differ."""
        return self.squares * self.responses > (1 + 1e-9) * self.reward**2


@dataclass
class RowRecord:
    """What a ledger knows of a row."""

    row: int
    location: str
    prompt: str
    labels: list[str]
    """The right answers."""
    draws: list[Draw] = field(default_factory=list)

    def total(self, name: str) -> int:
        """Return the sum of a number over all draws."""
        return sum(getattr(draw, name) for draw in self.draws)


def read_ledger(folder: Path) -> tuple[list[RowRecord], list[str]]:
    """Return the rows of a run's ledger with their draws in order, and the held-out prompts.

    Raises FileNotFoundError if there is no ledger.
    """
    path = folder / LEDGER_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {LEDGER_FILE}: --ledger writes one")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
        records = {
            row: RowRecord(row, location, prompt, json.loads(labels))
            for row, location, prompt, labels in file.execute("SELECT * FROM prompts ORDER BY row")
        }
        for line in file.execute("SELECT * FROM draws ORDER BY step, rowid"):
            records[line[1]].draws.append(Draw(*line))
        held_out = [text for (text,) in file.execute("SELECT prompt FROM held_out")]
    return [record for record in records.values() if record.draws], held_out
