"""What a search has found: a table in the terminal, best.yaml, and the page tune.html."""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from lightrft.app.cli import read_command_line
from lightrft.app.observe.report import write_page
from lightrft.app.observe.text import duration, percent, short
from lightrft.config.sections import SECTIONS
from lightrft.extras.tune.choice import Belief, beliefs
from lightrft.extras.tune.search import Search
from lightrft.extras.tune.space import as_flags
from lightrft.extras.tune.trials import SHARES, RunRecord, Trial

BEST = "best.yaml"
PAGE = "tune.html"
PLAIN_WIDTH = 130
"""Columns of a table that is not printed to a terminal."""


class Findings:
    """The trials of a search, ranked, with what is known about the ones that came to the end."""

    def __init__(self, search: Search):
        self.search = search
        self.metric = search.launcher.metric
        self.ranked = search.ranked()
        self.finalists = [each for each in self.ranked if len(each.values) == len(SHARES)]
        self.beliefs: list[Belief] = (
            beliefs([each.results for each in self.finalists], minimize=search.minimize) or []
        )

    @property
    def certainty(self) -> str:
        """How sure the choice is, in a sentence."""
        if not self.ranked:
            return "No trial has a value yet."
        best = self.ranked[0]
        if not self.finalists:
            return (
                f"Trial {best.number} leads, but no trial has come to the end: a larger --budget"
                " continues."
            )
        if not self.beliefs:
            return (
                f"Trial {best.number} is the best of one run each. Another seed may give another"
                " order: --seeds 2 repeats the finalists."
            )
        return (
            f"Trial {best.number} is the best of {len(self.finalists)} finalists with a probability"
            f" of {percent(self.beliefs[0].probability)}, under the noise of seeds."
        )

    @property
    def rows(self) -> list[list[str]]:
        """Cells of a table with a row for each trial."""
        names = [*self.search.study.distributions]
        rows = [["trial", *names, self.metric, "90 %", "seeds", "step", "tokens", "time", "end"]]
        others = [each for each in self.search.study.trials if each.reason or not each.values]
        for place, trial in enumerate([*self.ranked, *others]):
            belief = self.beliefs[place] if place < len(self.beliefs) else None
            rows.append(
                [
                    str(trial.number),
                    *(_text(trial.parameters[name]) for name in names),
                    short(fmean(trial.results)) if trial.results else "",
                    f"{short(belief.low)} to {short(belief.high)}" if belief else "",
                    str(len(trial.results)),
                    str(trial.steps[-1]) if trial.steps else "",
                    f"{trial.tokens:,}",
                    duration(trial.seconds),
                    trial.reason or _end(trial),
                ]
            )
        return rows

    def print(self) -> None:
        """Print the table, the price, and how sure the choice is."""
        names, *rows = self.rows
        table = Table(*names)
        for row in rows:
            table.add_row(*row)
        console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
        console.print(table)
        trials = self.search.study.trials
        tokens = sum(each.tokens for each in trials)
        seconds = sum(each.seconds for each in trials)
        console.print(f"{len(trials)} trials, {tokens:,} tokens, {duration(seconds)} of runs")
        console.print(self.certainty, markup=False)

    def write(self) -> list[Path]:
        """Write the page, and the configuration of the best trial if there is one."""
        folder = self.search.folder
        curves = []
        for trial in self.ranked:
            rows = RunRecord(self.search.folder_of(trial)).rows
            points = [(row["step"], row[self.metric]) for row in rows if self.metric in row]
            steps, values = zip(*points, strict=True)
            curves.append({"label": f"trial {trial.number}", "steps": steps, "values": values})

        tuning = {
            "metric": self.metric,
            "lower": self.search.minimize,
            "certainty": self.certainty,
            "names": [*self.search.study.distributions],
            "logarithmic": [each.name for each in self.search.study.parameters if each.log],
            "trials": [
                {
                    "number": each.number,
                    "values": [*each.parameters.values(), fmean(each.results)],
                    "whole": each in self.finalists,
                }
                for each in self.ranked
            ],
            "curves": curves,
            "rows": self.rows,
        }
        data = {"title": f"tune {folder.resolve().name}", "runs": [], "tuning": tuning}
        written = [write_page(folder / PAGE, data)]
        if self.ranked:
            written.append(folder / BEST)
            written[-1].write_text(self.configuration(self.ranked[0]))
        return written

    def configuration(self, trial: Trial) -> str:
        """Return the configuration of a trial as a whole run in a folder of its own."""
        launcher = self.search.launcher
        where = [f"--save_path={self.search.folder / 'best'}", f"--seed={self.search.seed}"]
        config = read_command_line(
            [*launcher.flags, *as_flags(trial.parameters), *where], launcher.command
        )
        sections: dict[str, dict[str, Any]] = {}
        for name in SECTIONS:
            section = getattr(config, name)
            values = {
                field: value for field, value in vars(section).items() if field in section.written
            }
            if values:
                sections[name] = values
        value = f"{self.metric} {short(fmean(trial.results))}"
        header = f"# Trial {trial.number} of lightrft tune, {value}:\n"
        header += f"#     lightrft {launcher.command} --config {self.search.folder / BEST}\n"
        return header + yaml.safe_dump(sections, sort_keys=False)


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _end(trial: Trial) -> str:
    if len(trial.values) == len(SHARES):
        return "whole"
    share = SHARES[len(trial.values) - 1] if trial.values else 0.0
    return f"ended at {percent(share)}" if share else "not begun"
