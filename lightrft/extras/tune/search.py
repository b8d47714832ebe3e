"""The search: all trials take the first ninth of their steps, a third of them goes on to the first
third, and a third of these to the end (successive halving, Jamieson and Talwalkar,
arXiv 1502.07943).
"""

import math
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from loguru import logger

from lightrft.app.observe.text import percent, short
from lightrft.extras.tools.forecast import Interval
from lightrft.extras.tune.optuna import Study
from lightrft.extras.tune.space import as_flags
from lightrft.extras.tune.trials import SHARES, Launcher, RunRecord, Trial

KEPT = 3
"""Of this many trials, one goes on to the next share of the steps."""
FIRST = 0.5
"""Share of the budget after which no trial begins."""

Job = tuple[Trial, float, int]
"""A trial, the share of its steps to reach, and the seed."""


class Search:
    """Finds the best values by runs that are paused and continued."""

    def __init__(
        self,
        folder: Path,
        study: Study,
        launcher: Launcher,
        *,
        seed: int,
        num_seeds: int = 1,
        num_trials: int,
        parallel: int = 1,
        budget: float = math.inf,
    ):
        """Set up a search. `budget` is the number of seconds of all calls together."""
        self.folder = folder
        self.study = study
        self.launcher = launcher
        self.seed = seed
        self.num_seeds = num_seeds
        self.num_trials = num_trials
        self.parallel = parallel
        self.budget = budget
        self.minimize = study.direction == "minimize"
        self.began = time.monotonic() - study.seconds
        launcher.deadline = self.began + budget

    @property
    def spent(self) -> float:
        """Seconds of all calls."""
        return time.monotonic() - self.began

    @property
    def within_budget(self) -> bool:
        return self.spent < self.budget

    def folder_of(self, trial: Trial, seed: int | None = None) -> Path:
        """Return the folder of a trial, or of its repetition with another seed."""
        repeated = "" if seed in (None, self.seed) else f"_seed_{seed}"
        return self.folder / f"trial_{trial.number:03d}{repeated}"

    def run(self) -> list[Trial]:
        """Search; return all trials, the best first. A second call continues."""
        group = self._first_share()
        for rung, share in enumerate(SHARES[1:], 1):
            group = self.promoted(group, rung)
            self._advance([(each, share, self.seed) for each in group if len(each.values) == rung])
            group = [each for each in group if len(each.values) > rung]

        self._repeat(group)
        if self.within_budget:
            for trial in self.study.trials:
                finished = any(each.number == trial.number for each in group)
                self._end(trial, fmean(trial.results) if finished else None)
        return self.ranked()

    def ranked(self) -> list[Trial]:
        """Return all trials with a value: those that have come farthest, and the best of these."""
        measured = [each for each in self.study.trials if each.values and not each.reason]
        return sorted(
            measured, key=lambda each: (-len(each.values), self._loss(fmean(each.results)))
        )

    def promoted(self, group: Sequence[Trial], rung: int) -> list[Trial]:
        """Return the trials that go on to the next share, the best first.

        A trial whose forecast of the end lies below the interval of the best one does not.
        """
        order = sorted(group, key=lambda each: self._loss(each.values[rung - 1]))
        least = 1 if self.num_seeds == 1 else 2
        chosen = order[: max(least, len(order) // KEPT)]
        forecasts = [self._forecast(each, rung) for each in chosen]
        best = forecasts[0] if forecasts else None

        kept: list[Trial] = []
        for trial, forecast in zip(chosen, forecasts, strict=True):
            lost = best is not None and forecast is not None and forecast.high < best.low
            if lost and len(kept) >= least:
                logger.info(
                    f"trial {trial.number} ends early: its forecast, at most {short(forecast.high)},"
                    f" is below that of trial {chosen[0].number}, at least {short(best.low)}"
                )
            else:
                kept.append(trial)
        return kept

    def _forecast(self, trial: Trial, rung: int) -> Interval | None:
        record = RunRecord(self.folder_of(trial))
        return record.forecast(self.launcher.metric, trial.steps[rung - 1], minimize=self.minimize)

    def _loss(self, value: float) -> float:
        return value if self.minimize else -value

    def _first_share(self) -> list[Trial]:
        """Let each trial take the first share of the steps, new ones too."""
        trials = self.study.trials
        waiting = [each for each in trials if not each.values and not each.reason]
        while self.within_budget:
            while len(waiting) < self.parallel and len(trials) < self.num_trials:
                begins = self.spent < FIRST * self.budget or not trials
                trial = self.study.propose() if begins else None
                if trial is None:
                    break
                waiting.append(trial)
                trials.append(trial)
            if not waiting:
                break
            self._advance([(each, SHARES[0], self.seed) for each in waiting[: self.parallel]])
            waiting = waiting[self.parallel :]
        return [each for each in self.study.trials if each.values and not each.reason]

    def _repeat(self, finalists: Sequence[Trial]) -> None:
        """Run the finalists from the beginning with the other seeds."""
        jobs = [
            (trial, SHARES[-1], self.seed + number)
            for number in range(1, self.num_seeds)
            for trial in finalists
            if len(trial.repeats) < number
        ]
        self._advance(jobs)

    def _advance(self, jobs: Sequence[Job]) -> None:
        """Do the jobs, some side by side, until the budget is used up."""
        for start in range(0, len(jobs), self.parallel):
            batch = jobs[start : start + self.parallel]
            if not self.within_budget:
                return
            with ThreadPoolExecutor(self.parallel) as pool:
                try:
                    ended = list(pool.map(self._job, batch, range(len(batch))))
                except BaseException:
                    self.launcher.stopping.set()  # the pool waits for the runs to be paused
                    raise
                finally:
                    self.study.seconds = self.spent
            for job, (seconds, reason) in zip(batch, ended, strict=True):
                self._record(job, seconds, reason)

    def _job(self, job: Job, slot: int) -> tuple[float, str]:
        trial, share, seed = job
        return self.launcher.advance(
            self.folder_of(trial, seed),
            [*as_flags(trial.parameters), f"--seed={seed}"],
            share,
            slot if self.parallel > 1 else None,
        )

    def _record(self, job: Job, seconds: float, reason: str) -> None:
        trial, share, seed = job
        record = RunRecord(self.folder_of(trial, seed))
        measured = record.measured(self.launcher.metric, share)
        trial.seconds += seconds
        trial.reason = reason
        if measured is not None and not reason:
            step, value = measured
            if not math.isfinite(value):
                trial.reason = f"{self.launcher.metric} was not finite at step {step}"
            elif seed == self.seed:
                trial.values.append(value)
                trial.steps.append(step)
            else:
                trial.repeats.append(value)

        folders = self.folder.glob(f"{self.folder_of(trial).name}*")
        trial.tokens = sum(RunRecord(each).tokens for each in folders)
        self.study.save(trial)
        if trial.reason:
            self._end(trial)
        said = trial.reason or (short(measured[1]) if measured else "paused")
        values = " ".join(f"{name}={value}" for name, value in trial.parameters.items())
        logger.info(f"trial {trial.number}, {values}: {percent(share)} of the steps: {said}")

    def _end(self, trial: Trial, value: float | None = None) -> None:
        """Tell Optuna, and remove the checkpoints, which are large and no longer needed."""
        self.study.end(trial, value)
        shutil.rmtree(self.folder_of(trial) / "checkpoints", ignore_errors=True)
