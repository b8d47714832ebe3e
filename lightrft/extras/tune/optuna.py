"""The study of a search in Optuna: it proposes values, and keeps all trials in study.db."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import optuna
from optuna import distributions
from optuna.trial import FrozenTrial, TrialState, create_trial

from lightrft.config.errors import ConfigError
from lightrft.extras.tune.space import Parameter, combinations
from lightrft.extras.tune.trials import Trial

MOST_DRAWS = 20
"""Number of proposals until one is new."""
FIRST_RANDOM = 5
"""Number of trials before Optuna models what is good."""
DIGITS = 3
"""Significant digits of a number between the ends of a range."""


class Study:
    """Trials of one question. Optuna's own tools, such as optuna-dashboard, read the file too.

    A paused trial is one that runs, for Optuna.
    """

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
        self.parameters = [*parameters]
        self.distributions = {each.name: _distribution(each) for each in parameters}
        self.direction = "minimize" if minimize else "maximize"
        self.sign = 1 if minimize else -1
        """Factor that makes a smaller number of a better metric."""
        self.seed = seed

        folder.mkdir(parents=True, exist_ok=True)
        self.storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}")
        self.study = optuna.create_study(
            storage=self.storage, study_name="tune", direction=self.direction, load_if_exists=True
        )
        # What was asked before decides what the trials in the file mean.
        before = self.study.user_attrs.get("question", question)
        if changed := sorted(name for name in question if before.get(name) != question[name]):
            other = f"{folder} has a search with another {', '.join(changed)}"
            raise ConfigError(f"{other}: choose another --out, or repeat the command as it was")
        self.study.set_user_attr("question", dict(question))
        self.seconds: float = self.study.user_attrs.get("seconds", 0.0)
        """Seconds of the calls before this one."""

    def keep_seconds(self, seconds: float) -> None:
        """Write the seconds of all calls."""
        self.study.set_user_attr("seconds", seconds)

    @property
    def trials(self) -> list[Trial]:
        return [
            Trial(each.number, each.params, **each.user_attrs.get("course", {}))
            for each in self.study.get_trials(deepcopy=False)
        ]

    def propose(self) -> Trial | None:
        """Return a new trial; None if all combinations have one.

        Optuna proposes its values by TPE, from the values of all trials so far.
        """
        before = self.study.get_trials(deepcopy=False)
        seed = self.seed + len(before)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=FIRST_RANDOM)
        seen = optuna.create_study(sampler=sampler, direction=self.direction)
        # What is paused has a value already, which Optuna reads from trials that have ended.
        seen.add_trials([self._frozen(each, "PRUNED") for each in self.trials if each.values])
        draws = (seen.ask(self.distributions).params for _ in range(MOST_DRAWS))
        ranges = any(each.is_range for each in self.parameters)
        others = [] if ranges else [*combinations(self.parameters)]
        random.Random(seed).shuffle(others)

        tried = [each.params for each in before]
        for drawn in chain(draws, others):
            values = {each.name: _rounded(each, drawn[each.name]) for each in self.parameters}
            if values not in tried:
                new = Trial(len(before), values)
                self.study.add_trial(self._frozen(new, "RUNNING"))
                return new
        return None

    def save(self, trial: Trial) -> None:
        """Write how a trial has done so far."""
        study = self.storage.get_study_id_from_name("tune")
        key = self.storage.get_trial_id_from_study_id_trial_number(study, trial.number)
        course = asdict(trial)
        del course["number"], course["parameters"]
        self.storage.set_trial_user_attr(key, "course", course)
        if trial.values:
            self.storage.set_trial_intermediate_value(key, trial.steps[-1], trial.values[-1])

    def end(self, trial: Trial, value: float | None) -> None:
        """Say that a trial has finished with a value, has failed for a reason, or was ended."""
        ended = TrialState.FAIL if trial.reason else TrialState.PRUNED
        state = ended if value is None else TrialState.COMPLETE
        self.study.tell(trial.number, value, state=state, skip_if_finished=True)

    def _frozen(self, trial: Trial, state: str) -> FrozenTrial:
        return create_trial(
            state=TrialState[state],
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
