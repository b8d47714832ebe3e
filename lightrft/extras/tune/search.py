"""The search: all trials take the first ninth of their steps, a third of them goes on to the first
third, and a third of these to the end (successive halving, Jamieson and Talwalkar,
arXiv 1502.07943).
"""

import math
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from loguru import logger

from lightrft.app.observe.text import percent, short
from lightrft.extras.tune.space import as_flags
from lightrft.extras.tune.trials import SHARES, Launcher, RunRecord, Trial

GROUP = 3
"""Of so many trials, one goes on to the next share of the steps."""
FIRST = 0.5
"""Share of the budget; no trial begins later."""

Job = tuple[Trial, float, int]
"""A trial, the share of its steps to reach, and the seed."""


@dataclass
class Search:
    """Finds the best values by runs that are paused and continued."""

    folder: Path
    study: Any
    """The Study of Optuna, which is imported only if it is needed."""
    launcher: Launcher
    seed: int
    num_trials: int
    num_seeds: int = 1
    parallel: int = 1
    budget: float = math.inf
    """Number of seconds of all calls together."""

    def __post_init__(self) -> None:
        self.began = time.monotonic() - self.study.seconds
        self.launcher.deadline = self.began + self.budget

    @property
    def spent(self) -> float:
        """Share of the budget that is used up, or 0 if there is none."""
        return (time.monotonic() - self.began) / self.budget

    def folder_of(self, trial: Trial, seed: int) -> Path:
        """Return the folder of a trial, or of its repetition with another seed."""
        repeated = "" if seed == self.seed else f"_seed_{seed}"
        return self.folder / f"trial_{trial.number:03d}{repeated}"

    def run(self) -> list[Trial]:
        """Search; return all trials with a value, the best first. A second call continues."""
        group = self._first_share()
        for rung, share in enumerate(SHARES[1:], 1):
            group = self.promoted(group, rung)
            waiting = [each for each in group if len(each.values) == rung and not each.reason]
            self.advance([(each, share, self.seed) for each in waiting])
            group = [each for each in group if len(each.values) > rung and not each.reason]

        # Each finalist starts from the beginning with the other seeds.
        for number in range(1, self.num_seeds):
            again = [each for each in group if len(each.repeats) < number]
            self.advance([(each, SHARES[-1], self.seed + number) for each in again])
        if self.spent < 1:
            finished = {each.number: fmean(each.results) for each in group}
            for trial in self.study.trials:
                self._end(trial, finished.get(trial.number))
        return self.ranked()

    def ranked(self) -> list[Trial]:
        """Return all trials with a value: those that have come farthest, and the best of these."""
        measured = [each for each in self.study.trials if each.values and not each.reason]
        sign = self.study.sign
        return sorted(measured, key=lambda each: (-len(each.values), sign * fmean(each.results)))

    def promoted(self, group: Sequence[Trial], rung: int) -> list[Trial]:
        """Return the trials that go on to the next share, the best first.

        A trial whose forecast of the end lies below the interval of the best one does not.
        """
        order = sorted(group, key=lambda each: self.study.sign * each.values[rung - 1])
        least = 1 if self.num_seeds == 1 else 2
        kept: list[Trial] = []
        best = math.inf
        for trial in order[: max(least, len(order) // GROUP)]:
            record = RunRecord(self.folder_of(trial, self.seed))
            end = record.forecast(self.launcher.metric, trial.steps[rung - 1], self.study.sign)
            if len(kept) >= least and end is not None and end.high < best:
                logger.info(f"trial {trial.number} ends: its forecast is below the best one's")
                continue
            if not kept:
                best = -math.inf if end is None else end.low
            kept.append(trial)
        return kept

    def _first_share(self) -> list[Trial]:
        """Let each trial take the first share of the steps, new ones too."""
        trials = self.study.trials
        waiting = [each for each in trials if not each.values and not each.reason]
        while self.spent < 1:
            while len(waiting) < self.parallel and len(trials) < self.num_trials:
                trial = self.study.propose() if self.spent < FIRST or not trials else None
                if trial is None:
                    break
                waiting.append(trial)
                trials.append(trial)
            if not waiting:
                break
            self.advance([(each, SHARES[0], self.seed) for each in waiting[: self.parallel]])
            waiting = waiting[self.parallel :]
        return [each for each in trials if each.values]

    def advance(self, jobs: Sequence[Job]) -> None:
        """Do the jobs, some side by side, until the budget is used up."""
        for start in range(0, len(jobs), self.parallel):
            batch = jobs[start : start + self.parallel]
            if self.spent >= 1:
                return
            with ThreadPoolExecutor(self.parallel) as pool:
                try:
                    ended = list(pool.map(self._run, batch, range(len(batch))))
                except BaseException:
                    self.launcher.stopping.set()  # the pool waits for the runs to be paused
                    raise
                finally:
                    self.study.keep_seconds(time.monotonic() - self.began)
            for job, (seconds, reason) in zip(batch, ended, strict=True):
                self._record(job, seconds, reason)

    def _run(self, job: Job, slot: int) -> tuple[float, str]:
        trial, share, seed = job
        flags = [*as_flags(trial.parameters), f"--seed={seed}"]
        place = slot if self.parallel > 1 else None
        return self.launcher.advance(self.folder_of(trial, seed), flags, share, place)

    def _record(self, job: Job, seconds: float, reason: str) -> None:
        trial, share, seed = job
        metric = self.launcher.metric
        measured = RunRecord(self.folder_of(trial, seed)).measured(metric, share)
        step, value = measured or (0, 0.0)
        if measured and not reason and not math.isfinite(value):
            reason = f"{metric} was not finite at step {step}"
        elif measured and not reason and seed == self.seed:
            trial.values.append(value)
            trial.steps.append(step)
        elif measured and not reason:
            trial.repeats.append(value)

        trial.reason = reason
        trial.seconds += seconds
        folders = self.folder.glob(f"{self.folder_of(trial, self.seed).name}*")
        trial.tokens = sum(RunRecord(each).tokens for each in folders)
        self.study.save(trial)
        if reason:
            self._end(trial, None)
        said = reason or (short(value) if measured else "paused")
        flags = " ".join(as_flags(trial.parameters))
        logger.info(f"trial {trial.number}, {flags}: {percent(share)} of the steps: {said}")

    def _end(self, trial: Trial, value: float | None) -> None:
        """Tell Optuna, and remove the checkpoints, which are large and no longer needed."""
        self.study.end(trial, value)
        shutil.rmtree(self.folder_of(trial, self.seed) / "checkpoints", ignore_errors=True)
