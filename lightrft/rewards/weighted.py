"""Several reward functions whose weighted sum is the reward.

They score all rows, or a column chooses the functions for each row.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightrft.config.errors import ConfigError
from lightrft.config.references import RewardTerm, chosen_labels
from lightrft.core.samples import Prompt, Sample
from lightrft.rewards.conventions import RewardFunction, as_number, num_rewards


@dataclass(eq=False)
class WeightedRewards:
    """Reward functions with weights; they are called one after the other, as one function."""

    functions: list[tuple[RewardTerm, RewardFunction]]
    key: str | None = None
    """Column that names the functions of the row, by label; None: all score every row."""
    models: Collection[str] = ()
    """Labels of reward models; the column may name these, too."""

    def __post_init__(self) -> None:
        self.labels = {term.label for term, _ in self.functions}.union(self.models)

    def judge(self, samples: list[Sample]) -> list[Any]:
        """Return the rewards of samples: named components, or a list of numbers for the tokens.

        Components are weighted, in a dictionary. A reward for tokens cannot be combined with named
        components; numbers for whole responses are then added at the last token. Raises ValueError
        for a function that does not return one reward for each sample.
        """
        returned: list[list[tuple[str, Any]]] = [[] for _ in samples]
        for term, function in self.functions:
            chosen = [
                row
                for row, sample in enumerate(samples)
                if term.label in self._choose_term(sample.prompt.columns)
            ]
            values = function.judge([samples[row] for row in chosen]) if chosen else []
            if num_rewards(values) != len(chosen):
                raise ValueError(
                    f"{term.label} returned {values!r:.200}, not a list of {len(chosen)} rewards,"
                    " one per sample"
                )
            for row, value in zip(chosen, values, strict=True):
                returned[row] += _weighted(term, value)

        return [_combine(components) for components in returned]

    @property
    def reads_messages(self) -> bool:
        """Return True if a function gets the messages of the prompt, from the column prompt."""
        return any(function.reads_messages for _, function in self.functions)

    @property
    def signatures(self) -> str:
        """Return the signatures of all functions as text."""
        return " ".join(function.signatures for _, function in self.functions)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise ConfigError if a function cannot be called with the columns of the prompts.

        These prompts are the ones that choose it.
        """
        prompts = list(prompts)
        for term, function in self.functions:
            try:
                function.check(
                    prompt for prompt in prompts if term.label in self._choose_term(prompt.columns)
                )
            except ConfigError as error:
                raise ConfigError(f"{term.label}: {error}") from error

    def row_problem(self, columns: Mapping[str, Any]) -> str:
        """Return why responses to a row with these columns cannot be scored.

        It is empty if no reason can be seen.
        """
        chosen = self._choose_term(columns)
        if self.key is not None and (not chosen or chosen - self.labels):
            wrong = ", ".join(sorted(map(str, chosen - self.labels))) or "nothing"
            return (
                f"the column {self.key} (--reward_key) names {wrong}; the rewards are"
                f" {', '.join(sorted(self.labels))}"
            )

        problems = [
            (term, function.row_problem(columns))
            for term, function in self.functions
            if term.label in chosen
        ]
        return next((f"{term.label}: {problem}" for term, problem in problems if problem), "")

    def _choose_term(self, columns: Mapping[str, Any]) -> set[str]:
        return chosen_labels(columns, self.key, self.labels)


def _weighted(term: RewardTerm, value: Any) -> list[tuple[str, Any]]:
    """Return (name, weighted value) of each component of a reward.

    A list of numbers for tokens is one component.
    """
    if isinstance(value, Mapping):
        return [
            (f"{term.label}_{name}", term.weight * _number(term, component))
            for name, component in value.items()
        ]

    if isinstance(value, list):
        weighed = [None if each is None else term.weight * _number(term, each) for each in value]
        return [(term.label, weighed)]

    return [(term.label, term.weight * _number(term, value))]


def _number(term: RewardTerm, value: Any) -> float:
    number = as_number(value)
    if not math.isfinite(number):
        raise ValueError(f"{term.label} returned {value!r:.200}, which is not a finite number")
    return number


def _combine(components: list[tuple[str, Any]]) -> Any:
    of_tokens = [value for _, value in components if isinstance(value, list)]
    if not of_tokens:
        return dict(components)
    if len({len(values) for values in of_tokens}) > 1:
        raise ValueError(
            "two rewards for tokens have different lengths:"
            f" {', '.join(str(len(values)) for values in of_tokens)}"
        )

    columns = zip(*of_tokens, strict=True)
    total = [_sum([each for each in column if each is not None]) for column in columns]
    of_responses = [value for _, value in components if not isinstance(value, list)]
    return [*total[:-1], _sum([*of_responses, *([] if total[-1] is None else [total[-1]])])]


def _sum(values: list[float]) -> float | None:
    return math.fsum(values) if values else None
