"""Proposals of Optuna, and the trials of a search, which search.yaml keeps."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import optuna
import yaml
from optuna import distributions
from optuna.trial import FrozenTrial, TrialState, create_trial

from lightrft.config.errors import ConfigError
from lightrft.extras.tune.space import Parameter
from lightrft.extras.tune.trials import Trial

FIRST_TRIALS = 5
"""Number of trials before Optuna models what is good."""
MOST_PROPOSALS = 5
"""Number of its proposals until one is new."""
MOST_DRAWS = 300
"""Number of evenly drawn values after them."""
DIGITS = 3
"""Significant digits of a number between the ends of a range."""


@dataclass(eq=False)
class Study:
    """Trials of one question."""

    folder: Path
    question: Mapping[str, Any]
    parameters: Sequence[Parameter]
    minimize: InitVar[bool]
    seed: int

    def __post_init__(self, minimize: bool) -> None:
        """Open the study in a folder; raise ConfigError if it asks another question."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.distributions = {each.name: _distribution(each) for each in self.parameters}
        self.direction = "minimize" if minimize else "maximize"
        self.sign = 1 if minimize else -1
        """Factor that makes a smaller number of a better metric."""

        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / "search.yaml"
        kept = yaml.safe_load(self.file.read_text()) if self.file.exists() else {}
        # What was asked before decides what the trials in the file mean.
        self.question = json.loads(json.dumps(self.question, default=str))
        before = kept.get("question", self.question)
        if changed := [
            f"{name} {before.get(name, 'unset')} -> {self.question.get(name, 'unset')}"
            for name in {**before, **self.question}
            if before.get(name, "unset") != self.question.get(name, "unset")
        ]:
            other = f"{self.folder} has another search ({'; '.join(changed)})"
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

        The first trials cover all ranges and choices. Further ones are what Optuna expects to be
        best by a Gaussian process, from the first value of each trial.
        """
        tried = [each.parameters for each in self.trials]
        for values in self._proposals():
            if values in tried:
                continue
            if not refuses(values):
                self.trials.append(Trial(len(self.trials), values))
                return self.trials[-1]
            tried.append(values)
        return None

    def _proposals(self) -> Iterator[dict[str, Any]]:
        number = len(self.trials)
        generator = np.random.default_rng([self.seed, number])
        measured = [each for each in self.trials if each.values and not each.reason]
        if number < FIRST_TRIALS:
            # a Latin hypercube: each of these trials has a fifth of each range of its own
            same = np.random.default_rng(self.seed)
            parts = [same.permutation(FIRST_TRIALS)[number] for _ in self.parameters]
            yield self._values((np.array(parts) + generator.random(len(parts))) / FIRST_TRIALS)
        elif measured:
            seed = int(generator.integers(2**31))
            sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=1)
            study = optuna.create_study(sampler=sampler, direction=self.direction)
            for each in measured:
                study.add_trial(self._frozen(each, TrialState.COMPLETE, each.values[0]))
            for _ in range(MOST_PROPOSALS):
                proposed = study.ask(self.distributions).params
                yield {each.name: _rounded(each, proposed[each.name]) for each in self.parameters}

        for _ in range(MOST_DRAWS):
            yield self._values(generator.random(len(self.parameters)))

    def _values(self, shares: Sequence[float]) -> dict[str, Any]:
        """Return the values at these shares, from 0 to 1, of each range or of the choices."""
        pairs = zip(self.parameters, shares, strict=True)
        return {each.name: _rounded(each, each.at(share)) for each, share in pairs}

    def export(self) -> None:
        """Write study.db, which Optuna's own tools read, also while the search goes on."""
        unfinished = self.folder / "study.part"
        unfinished.unlink(missing_ok=True)
        storage = f"sqlite:///{unfinished}"
        study = optuna.create_study(storage=storage, study_name="tune", direction=self.direction)
        for trial in self.trials:
            ended = TrialState.PRUNED if trial.values else TrialState.WAITING
            state = TrialState.COMPLETE if trial.whole else ended
            state = TrialState.FAIL if trial.reason else state
            value = fmean(trial.results) if state == TrialState.COMPLETE else None
            study.add_trial(self._frozen(trial, state, value))
        unfinished.replace(self.folder / "study.db")

    def _frozen(self, trial: Trial, state: TrialState, value: float | None) -> FrozenTrial:
        return create_trial(
            state=state,
            value=value,
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
