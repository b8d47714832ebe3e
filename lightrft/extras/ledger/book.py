"""Write a record of each group into ledger.sqlite (--ledger)."""

import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from lightrft.app.observe.sinks import Writer
from lightrft.config.sections import Config
from lightrft.core.metrics import Metrics
from lightrft.core.samples import RIGHT, Prompt, Sample
from lightrft.extras.ledger.answers import answer_reader, labels_of
from lightrft.extras.ledger.records import LEDGER_FILE, Draw
from lightrft.models.parallel.mesh import Mesh

TABLES = Path(__file__).with_name("tables.sql").read_text()


class Book:
    """Adds the groups of each step to the ledger of a run. It is a measure of a step."""

    def __init__(self, config: Config, mesh: Mesh, writer: Writer, held_out: Sequence[Prompt] = ()):
        """Set up the ledger in a run's folder. `held_out` are the prompts of --eval_data."""
        self.path = Path(config.train.save_path) / LEDGER_FILE
        self.mesh = mesh
        self.writer = writer
        self.answer = answer_reader(config.reward.reward)
        self.held_out = [(prompt.text,) for prompt in held_out]
        self._known: set[int] = set()
        """Rows whose prompt is in the file."""

    def measure(self, step: int, samples: list[Sample], version: int, metrics: Metrics) -> None:
        """Let the writer of rank 0 add the groups of a step. All ranks call it together."""
        # Samples of a group come together.
        groups = [list(each) for _, each in groupby(samples, lambda sample: sample.group)]
        local = [
            (group[0].group, self._draw(step, group), self._prompt(group[0].prompt))
            for group in groups
        ]

        shares = self.mesh.data.gather(local)
        if self.mesh.world.rank == 0:
            gathered = sorted(chain.from_iterable(shares))
            draws = [draw for _, draw, _ in gathered]
            prompts = [prompt for *_, prompt in gathered if prompt is not None]
            self.writer.submit(partial(self._write, step, draws, prompts))

    def _draw(self, step: int, group: list[Sample]) -> Draw:
        answers = map(self.answer, [sample.text for sample in group]) if self.answer else ()
        return Draw(
            step,
            group[0].prompt.index,
            len(group),
            sum(sample.reward > RIGHT for sample in group),
            sum(sample.reward for sample in group),
            sum(sample.reward**2 for sample in group),
            sum(len(sample.token_ids) for sample in group),
            sum(sample.truncated for sample in group),
            json.dumps(Counter(filter(None, answers)), ensure_ascii=False),
        )

    def _prompt(self, prompt: Prompt) -> tuple[int, str, str, str] | None:
        """Return what is written once of a row; None if this process has sent it before."""
        if prompt.index in self._known:
            return None
        self._known.add(prompt.index)
        labels = labels_of(prompt.columns.get("label"), self.answer)
        media = [item.name for items in prompt.multi_modal.values() for item in items]
        text = " ".join([prompt.text, *media])
        return prompt.index, prompt.location, text, json.dumps(labels, ensure_ascii=False)

    def _write(self, step: int, draws: list[Draw], prompts: list[tuple[Any, ...]]) -> None:
        with closing(sqlite3.connect(self.path, timeout=60)) as file, file:
            file.execute("PRAGMA journal_mode=WAL")  # others may read meanwhile
            file.executescript(TABLES)
            # A run that was killed comes to steps again that the file already has.
            file.execute("DELETE FROM draws WHERE step >= ?", (step,))
            file.executemany("INSERT INTO draws VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", draws)
            file.executemany("INSERT OR REPLACE INTO prompts VALUES (?, ?, ?, ?)", prompts)
            file.executemany("INSERT OR IGNORE INTO held_out VALUES (?)", self.held_out)
            self.held_out = []
