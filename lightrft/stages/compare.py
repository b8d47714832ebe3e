"""Options of the comparison of rewards: shaping, weights by difficulty, components, greedy answers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms.advantage import estimators, solved_share, weighted_by_difficulty
from lightrft.algorithms.options import options_of
from lightrft.algorithms.shaping import RewardShaper
from lightrft.config.sections import AlgorithmSection
from lightrft.core.groups import RewardColumn, RewardTable
from lightrft.core.samples import Sample
from lightrft.core.stages import CompareRewards
from lightrft.core.strategy import DataRanks
from lightrft.core.table import keywords

COMPONENTS = "components"
GREEDY = "greedy_rewards"


def compare_rewards(
    section: AlgorithmSection, shaper: RewardShaper, weights: Mapping[str, float]
) -> CompareRewards:
    """Return what calls the estimator of --advantage_estimator.

    `weights` has the weight of each reward by label.
    """
    estimator = estimators[section.advantage_estimator]
    options = options_of(estimator, section)
    if COMPONENTS in keywords(estimator):
        compare = CompareComponents(estimator, shaper, section.difficulty_weights, weights, options)
    elif shaper.is_enabled or section.difficulty_weights:
        compare = CompareShapedRewards(estimator, shaper, section.difficulty_weights, options)
    else:
        compare = CompareRewards(estimator, **options)

    if GREEDY in keywords(estimator):
        compare.columns[GREEDY] = greedy_column
    return compare


def greedy_column(sample: Sample) -> list[float]:
    """Return the reward of the greedy response at a response's last reward, 0 at the others."""
    return [0.0] * (len(sample.steps) - 1) + [sample.greedy_reward]


class CompareShapedRewards(CompareRewards):
    """Shapes rewards before they are compared, so that no statistic covers only one rank.

    With `difficulty_weights`, advantages of rare outcomes count more.
    """

    def __init__(
        self,
        estimator: Callable[..., Tensor],
        shaper: RewardShaper,
        difficulty_weights: Sequence[float] | None,
        options: Mapping[str, Any],
    ):
        super().__init__(estimator, **options)
        self.shaper = shaper
        self.difficulty_weights = difficulty_weights

    def __call__(self, table: RewardTable) -> Tensor:
        advantages = super().__call__(table)
        if self.difficulty_weights:
            least, most = self.difficulty_weights
            solved = solved_share(*table.totals())[table["row"].unique(return_inverse=True)[1]]
            advantages = weighted_by_difficulty(advantages, solved, least=least, most=most)
        return advantages

    def rewards(self, table: RewardTable) -> Tensor:
        if not self.shaper.is_enabled:
            return super().rewards(table)
        return self.shaper(table["reward"], table["group"].long(), table["response_length"])


class CompareComponents(CompareShapedRewards):
    """Gives an estimator the named parts of each reward, with their weights.

    A response whose reward has no parts, or that has several rewards, has the part `reward`.
    """

    def __init__(
        self,
        estimator: Callable[..., Tensor],
        shaper: RewardShaper,
        difficulty_weights: Sequence[float] | None,
        weights: Mapping[str, float],
        options: Mapping[str, Any],
    ):
        super().__init__(estimator, shaper, difficulty_weights, options)
        self.weights = weights
        for name in (COMPONENTS, "component_weights"):
            self.columns.pop(name, None)

    def gather(self, data: DataRanks, samples: Sequence[Sample], *, first_row: int) -> RewardTable:
        """Return the table of rewards with a column for each component.

        One more collective is for their names.
        """
        mine = {name for sample in samples for name in _components(sample, sample.reward)}
        names = sorted(set().union(*data.gather(mine)))
        columns = {f"{COMPONENTS}/{name}": _component_column(name) for name in names}
        return RewardTable.share(data, samples, first_row=first_row, more=self.columns | columns)

    def inputs(self, table: RewardTable) -> dict[str, Tensor]:
        named = {
            name.removeprefix(f"{COMPONENTS}/"): values
            for name, values in table.columns.items()
            if name.startswith(f"{COMPONENTS}/")
        }
        weights = [self._weight(name) for name in named]
        return super().inputs(table) | {
            # Rounded like shaped rewards, whose float64 sums are exact: equal parts have no spread.
            COMPONENTS: torch.stack([*named.values()], 1).float(),
            "component_weights": torch.tensor(weights, dtype=torch.float64),
        }

    def _weight(self, component: str) -> float:
        """Return the weight of the reward that a component belongs to.

        A reward with named parts has components LABEL_NAME.
        """
        labels = [each for each in self.weights if f"{component}_".startswith(f"{each}_")]
        return self.weights[max(labels, key=len)] if labels else 1.0


def _components(sample: Sample, reward: float) -> dict[str, float]:
    """Return the named parts of a reward, or the reward itself as its only part."""
    named = sample.reward_parts if sample.token_rewards is None else {}
    return named or {"reward": reward}


def _component_column(name: str) -> RewardColumn:
    return lambda sample: [_components(sample, reward).get(name, 0.0) for _, reward in sample.steps]
