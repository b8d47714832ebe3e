"""The search: all trials take the first ninth of their steps, a third of them goes on to the first
third, and a third of these to the end (successive halving, Jamieson and Talwalkar,
arXiv 1502.07943).
"""

import math
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from loguru import logger

from lightrft.app.observe.text import short
from lightrft.config.errors import ConfigError
from lightrft.extras.tools.forecast import Interval
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
    recording: threading.Lock = field(default_factory=threading.Lock)

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

    def folders_of(self, trial: Trial) -> list[Path]:
        """Return the folders of a trial and of all its repetitions."""
        first = self.folder_of(trial, self.seed)
        return [first, *self.folder.glob(f"{first.name}_seed_*")]

    def run(self) -> list[Trial]:
        """Search; return all trials with a value, the best first.

        A second call continues, also with more trials, seeds or time than the first one.
        """
        share = 0.0
        try:
            while self.spent < 1 and (jobs := self.next_jobs()):
                if jobs[0][1] != share:  # all trials have come to the last one
                    self.study.export()
                    share = jobs[0][1]
                self.advance(jobs)
        finally:
            self.study.export()
        if self.spent < 1 and len(self.study.trials) >= self.num_trials:
            for trial in self.study.trials:
                self._remove_checkpoints(trial)
        return self.ranked()

    def next_jobs(self) -> list[Job]:
        """Return the runs that come next, from what is known of all trials; none at the end."""
        trials = self.study.trials
        new = [each for each in trials if not each.values and not each.reason]
        while len(new) < self.parallel and (trial := self._new_trial()):
            new.append(trial)
        if new:
            return [(each, SHARES[0], self.seed) for each in new[: self.parallel]]

        group = [each for each in trials if each.values]
        for rung, share in enumerate(SHARES[1:], 1):
            group = self.promoted(group, rung)
            if waiting := [each for each in group if len(each.values) == rung]:
                return [(each, share, self.seed) for each in waiting]

        # Each finalist starts from the beginning with the other seeds.
        for seed in range(self.seed + 1, self.seed + self.num_seeds):
            if again := [each for each in group if seed not in each.repeats]:
                return [(each, SHARES[-1], seed) for each in again]
        return []

    def _new_trial(self) -> Trial | None:
        """Return a trial that can still begin, if there is one."""
        trials = self.study.trials
        if len(trials) >= self.num_trials or (trials and self.spent >= FIRST):
            return None
        trial = self.study.propose(self.launcher.refuses)
        if trial is None:  # all combinations have one
            self.num_trials = len(trials)
        return trial

    def ranked(self) -> list[Trial]:
        """Return all trials with a value: those that have come farthest, and the best of these."""
        measured = [each for each in self.study.trials if each.values and not each.reason]
        sign = self.study.sign
        return sorted(measured, key=lambda each: (-len(each.values), sign * fmean(each.results)))

    def promoted(self, group: Sequence[Trial], rung: int) -> list[Trial]:
        """Return the trials that go on to the next share, the best first.

        The next best one takes the place of one that fails later. A trial whose forecast of the end
        lies below the interval of the best one does not go on.
        """
        alive = [each for each in group if not each.reason]
        order = sorted(alive, key=lambda each: self.study.sign * each.values[rung - 1])
        least = 1 if self.num_seeds == 1 else 2
        going = order[: max(least, len(group) // GROUP)]
        ends = [self._forecast(each, rung) for each in going]
        far = [place for place, end in enumerate(ends) if place < least or end.high >= ends[0].low]
        return [going[place] for place in far]

    def _forecast(self, trial: Trial, rung: int) -> Interval:
        record = RunRecord(self.folder_of(trial, self.seed))
        return record.forecast(self.launcher.metric, trial.steps[rung - 1], self.study.sign)

    def advance(self, jobs: Sequence[Job]) -> None:
        """Do the jobs, some side by side, until the budget is used up."""
        for start in range(0, len(jobs), self.parallel):
            batch = jobs[start : start + self.parallel]
            if self.spent >= 1:
                return
            with ThreadPoolExecutor(self.parallel) as pool:
                try:
                    list(pool.map(self._run, batch, range(len(batch))))
                except BaseException:
                    self.launcher.stopping.set()  # the pool waits for the runs to be paused
                    raise

    def _run(self, job: Job, slot: int) -> None:
        trial, share, seed = job
        folder = self.folder_of(trial, seed)
        flags = [*as_flags(trial.parameters), f"--seed={seed}"]
        place = slot if self.parallel > 1 else None
        begun = bool(RunRecord(folder).rows)
        try:
            seconds, reason = self.launcher.advance(folder, flags, share, place)
        except ConfigError as error:
            # What other trials can do, and this one never could, is at fault with its values.
            if begun or not any(each.values for each in self.study.trials):
                raise
            seconds, reason = 0.0, str(error)
        with self.recording:
            self._record(job, seconds, reason)

    def _record(self, job: Job, seconds: float, reason: str) -> None:
        trial, share, seed = job
        metric = self.launcher.metric
        record = RunRecord(self.folder_of(trial, seed))
        measured = None if reason else record.measured(metric, share)
        step, value = measured or (0, 0.0)
        if measured and not math.isfinite(value):
            reason = f"{metric} was not finite at step {step}"
        elif measured and seed == self.seed:
            trial.values.append(value)
            trial.steps.append(step)
        elif measured:
            trial.repeats[seed] = value

        if reason:
            trial.reason = reason if seed == self.seed else f"with seed {seed}: {reason}"
            self._remove_checkpoints(trial)
        trial.seconds += seconds
        trial.tokens = sum(RunRecord(each).tokens for each in self.folders_of(trial))
        self.study.save(time.monotonic() - self.began)
        said = trial.reason or (f"{short(value)} at step {step}" if measured else "paused")
        logger.info(f"trial {trial.number}, {' '.join(as_flags(trial.parameters))}: {said}")

    def _remove_checkpoints(self, trial: Trial) -> None:
        """Remove the checkpoints, which are large and no longer needed."""
        for folder in self.folders_of(trial):
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
