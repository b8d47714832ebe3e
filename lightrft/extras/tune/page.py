"""What a search has found: a table in the terminal, best.yaml, and the page tune.html."""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightrft.app.cli import read_command_line
from lightrft.app.observe.report import write_page
from lightrft.app.observe.text import duration, percent, short
from lightrft.extras.tune.choice import Belief, beliefs
from lightrft.extras.tune.search import Search
from lightrft.extras.tune.space import as_flags, written_values
from lightrft.extras.tune.trials import RunRecord, Trial

PLAIN_WIDTH = 130
"""Columns of a table that is not printed to a terminal."""


class Findings:
    """The trials of a search, ranked, with what is known about the ones that came to the end."""

    def __init__(self, search: Search):
        self.search = search
        self.metric = search.launcher.metric
        self.names = [*search.study.distributions]
        self.trials = search.study.trials
        self.ranked = search.ranked()
        whole = [each.results for each in self.ranked if each.whole]
        self.num_finalists = len(whole)
        self.num_results = max(map(len, whole), default=0)
        self.beliefs: list[Belief] = beliefs(whole, minimize=search.study.sign > 0) or []

    @property
    def certainty(self) -> str:
        """How sure the choice is, in a sentence."""
        if not self.ranked:
            return "No trial has a value."
        if len({each.values[0] for each in self.ranked}) == 1 < len(self.ranked):
            return f"All trials have the same {self.metric}, so look whether they learn at all."
        best = f"Trial {self.ranked[0].number}"
        if not self.num_finalists:
            return f"{best} leads, but none has come to the end: a larger --budget continues."
        if self.num_results == 1:
            return f"{best} is the best of one run each: --seeds 2 says how sure that is."
        if self.num_finalists == 1:
            return f"{best} is the only one at the end, so nothing says how sure the choice is."
        if not self.beliefs:
            return f"{best} is first, but seeds make no difference, which says nothing about noise."
        of = f"{best} is the best of {self.num_finalists} finalists with a probability of"
        return f"{of} {percent(self.beliefs[0].probability)}, under the noise of seeds."

    @property
    def rows(self) -> list[list[str]]:
        """Cells of a table; the first row has the names."""
        rows = [["trial", *self.names, self.metric, "90 %", "seeds", "tokens", "time", "end"]]
        others = [each for each in self.trials if each not in self.ranked]
        for place, trial in enumerate([*self.ranked, *others]):
            belief = self.beliefs[place] if place < len(self.beliefs) else None
            known = f"{short(belief.low)} to {short(belief.high)}" if belief else ""
            value = short(fmean(trial.results)) if trial.results else ""
            values = [*map(str, trial.parameters.values()), value, known, str(len(trial.results))]
            price = [f"{trial.tokens:,}", duration(trial.seconds)]
            end = f"until step {trial.steps[-1]}" if trial.steps else "not begun"
            if trial.whole:
                end = "whole"
            rows.append([str(trial.number), *values, *price, trial.reason or end])
        return rows

    def print(self) -> None:
        """Print the table, the price, and how sure the choice is."""
        names, *rows = self.rows
        table = Table(*map(escape, names))
        for row in rows:
            table.add_row(*map(escape, row))
        console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
        console.print(table)
        price = f"{sum(each.tokens for each in self.trials):,} tokens"
        time = duration(sum(each.seconds for each in self.trials))
        trials = f"{len(self.trials)} trials"
        if len(self.trials) < self.search.num_trials:
            trials = f"{len(self.trials)} of {self.search.num_trials} trials when the budget ended"
        console.print(f"{trials}, {price}, {time} of runs")
        console.print(self.certainty, markup=False)

    def write(self) -> list[Path]:
        """Write the page, and the configuration of the best trial if there is one."""
        folder = self.search.folder
        data = {"title": f"tune {folder.resolve().name}", "runs": [], "tuning": self._drawn()}
        written = [write_page(folder / "tune.html", data)]
        if self.ranked:
            written.append(folder / "best.yaml")
            written[-1].write_text(self._configuration(self.ranked[0], written[-1]))
        return written

    def _drawn(self) -> dict[str, Any]:
        """Return what the script of the page draws."""
        trials = []
        for trial in self.ranked:
            rows = RunRecord(self.search.folder_of(trial, self.search.seed)).rows
            points = {row["step"]: row[self.metric] for row in rows if self.metric in row}
            curve = {"steps": [*points], "values": [*points.values()]}
            drawn = {"number": trial.number, "parameters": trial.parameters, "curve": curve}
            trials.append(drawn | {"result": fmean(trial.results)})

        return {
            "metric": self.metric,
            "lower": self.search.study.sign > 0,
            "certainty": self.certainty,
            "finalists": self.num_finalists,
            "logarithmic": [each.name for each in self.search.study.parameters if each.log],
            "trials": trials,
            "rows": self.rows,
        }

    def _configuration(self, trial: Trial, file: Path) -> str:
        """Return the configuration of a trial as a run in a folder of its own."""
        launcher = self.search.launcher
        own = [f"--save_path={file.with_suffix('')}", f"--seed={self.search.seed}"]
        flags = [*launcher.flags, *as_flags(trial.parameters), *own]
        config = read_command_line(flags, launcher.command)
        value = short(fmean(trial.results))
        head = f"# Trial {trial.number} of lightrft tune, {self.metric} {value}:"
        run = f"#     lightrft {launcher.command} --config {file}"
        return f"{head}\n{run}\n{yaml.safe_dump(written_values(config))}"
