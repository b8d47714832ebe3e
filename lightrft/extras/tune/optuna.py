"""Proposals of Optuna, and the trials of a search, which search.yaml keeps."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
import yaml
from optuna import distributions
from optuna.trial import FrozenTrial, TrialState, create_trial

from lightrft.config.errors import ConfigError
from lightrft.extras.tune.space import Parameter
from lightrft.extras.tune.trials import Trial

MOST_PROPOSALS = 20
"""Number of proposals until one is new."""
MOST_DRAWS = 300
"""Number of evenly drawn values after them."""
FIRST_RANDOM = 5
"""Number of trials before Optuna models what is good."""
DIGITS = 3
"""Significant digits of a number between the ends of a range."""


class Study:
    """Trials of one question."""

    def __init__(
        self,
        folder: Path,
        question: Mapping[str, Any],
        parameters: Sequence[Parameter],
        *,
        minimize: bool,
        seed: int,
    ):
        """Open the study in a folder; raise ConfigError if it asks another question."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        self.parameters = [*parameters]
        self.distributions = {each.name: _distribution(each) for each in parameters}
        self.direction = "minimize" if minimize else "maximize"
        self.sign = 1 if minimize else -1
        """Factor that makes a smaller number of a better metric."""
        self.seed = seed

        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "search.yaml"
        kept = yaml.safe_load(self.file.read_text()) if self.file.exists() else {}
        # What was asked before decides what the trials in the file mean.
        self.question = json.loads(json.dumps(question, default=str))
        before = kept.get("question", self.question)
        if changed := [name for name in question if before.get(name) != self.question[name]]:
            other = f"{folder} has a search with another {', '.join(changed)}"
            raise ConfigError(f"{other}: choose another --out, or repeat the command as it was")
        self.seconds: float = kept.get("seconds", 0.0)
        """Seconds of all calls."""
        self.trials = [Trial(**each) for each in kept.get("trials", [])]

    def save(self, seconds: float) -> None:
        """Write the trials, and the seconds of all calls."""
        self.seconds = seconds
        trials = [asdict(each) for each in self.trials]
        kept = {"question": self.question, "seconds": seconds, "trials": trials}
        unfinished = self.file.with_suffix(".part")
        unfinished.write_text(yaml.safe_dump(kept, sort_keys=False))
        unfinished.replace(self.file)

    def propose(self, refuses: Callable[[Mapping[str, Any]], bool]) -> Trial | None:
        """Add a trial with new values that are not refused, and return it; None if none are left.

        Optuna proposes its values by TPE, from the values of all trials so far.
        """
        seed = self.seed + len(self.trials)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=FIRST_RANDOM)
        seen = optuna.create_study(sampler=sampler, direction=self.direction)
        # What is paused has a value already, which Optuna reads from trials that have ended.
        measured = [each for each in self.trials if each.values]
        seen.add_trials([self._frozen(each, TrialState.PRUNED) for each in measured])
        even = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
        studies = [seen] * MOST_PROPOSALS + [even] * MOST_DRAWS

        tried = [each.parameters for each in self.trials]
        for study in studies:
            drawn = study.ask(self.distributions).params
            values = {each.name: _rounded(each, drawn[each.name]) for each in self.parameters}
            if values in tried:
                continue
            if not refuses(values):
                self.trials.append(Trial(len(self.trials), values))
                return self.trials[-1]
            tried.append(values)
        return None

    def export(self) -> None:
        """Write study.db, which Optuna's own tools read."""
        file = self.folder / "study.db"
        file.unlink(missing_ok=True)
        storage = f"sqlite:///{file}"
        study = optuna.create_study(storage=storage, study_name="tune", direction=self.direction)
        for trial in self.trials:
            ended = TrialState.PRUNED if trial.values else TrialState.WAITING
            state = TrialState.COMPLETE if trial.whole else ended
            study.add_trial(self._frozen(trial, TrialState.FAIL if trial.reason else state))

    def _frozen(self, trial: Trial, state: TrialState) -> FrozenTrial:
        return create_trial(
            state=state,
            value=fmean(trial.results) if state == TrialState.COMPLETE else None,
            params=trial.parameters,
            distributions=self.distributions,
            intermediate_values=dict(zip(trial.steps, trial.values, strict=True)),
        )


def _distribution(parameter: Parameter) -> distributions.BaseDistribution:
    if not parameter.is_range:
        return distributions.CategoricalDistribution(parameter.values)
    low, high = parameter.values
    whole = isinstance(low, int)
    kind = distributions.IntDistribution if whole else distributions.FloatDistribution
    return kind(low, high, log=parameter.log)


def _rounded(parameter: Parameter, value: Any) -> Any:
    """Return a number with the digits that a person would write, inside of its range."""
    if not isinstance(value, float) or not parameter.is_range:
        return value
    low, high = parameter.values
    return min(max(float(f"{value:.{DIGITS}g}"), low), high)
