"""Options of the comparison of rewards: shaping, weights by difficulty, components, greedy answers."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lightrft.algorithms.advantage import estimators, solved_share, weighted_by_difficulty
from lightrft.algorithms.options import options_of
from lightrft.algorithms.rollout.episode_roles import role_rewards
from lightrft.algorithms.shaping import RewardShaper
from lightrft.config.errors import ConfigError
from lightrft.config.sections import AlgorithmSection
from lightrft.core.advantages import CompareRewards
from lightrft.core.groups import RewardTable
from lightrft.core.samples import Sample
from lightrft.core.strategy import DataRanks

COMPONENTS = "components"
COMPONENT_WEIGHTS = "component_weights"
GREEDY = "greedy_rewards"


def compare_rewards(
    section: AlgorithmSection, shaper: RewardShaper, weights: Mapping[str, float]
) -> CompareRewards:
    """Return what calls the estimator of --advantage_estimator.

    `weights` has the weight of each reward by label.
    """
    estimator = estimators[section.advantage_estimator]
    compare = CompareRewards(estimator, **options_of(estimator, section))
    if shaper.is_enabled or section.difficulty_weights or COMPONENTS in compare.asked:
        compare = CompareShapedRewards(section, shaper, weights)
    if GREEDY in compare.asked:
        compare.columns[GREEDY] = greedy_column
    return compare


def columns_of_data(section: AlgorithmSection) -> list[str]:
    """Return the columns of the data that --advantage_estimator reads."""
    estimator = estimators[section.advantage_estimator]
    asked = CompareRewards(estimator, **options_of(estimator, section)).columns
    return [name for name in asked if name not in (COMPONENTS, COMPONENT_WEIGHTS, GREEDY)]


def greedy_column(sample: Sample) -> list[float]:
    """Return the reward of the greedy response at a response's last reward, 0 at the others.

    Raises ConfigError if roles have separate rewards: the greedy response has one of all roles.
    """
    if role_rewards(sample):
        raise ConfigError(
            "--advantage_estimator remax does not support rewards of roles: it compares with the one"
            " reward of a greedy response; choose another estimator, such as rloo"
        )
    return [0.0] * (len(sample.steps) - 1) + [sample.greedy_reward]


class CompareShapedRewards(CompareRewards):
    """Shapes rewards before they are compared, so that no statistic covers only one rank.

    Estimators may read the named components of each reward, with their weights. With
    --difficulty_weights, advantages of rare outcomes count more.
    """

    def __init__(
        self, section: AlgorithmSection, shaper: RewardShaper, weights: Mapping[str, float]
    ):
        estimator = estimators[section.advantage_estimator]
        super().__init__(estimator, **options_of(estimator, section))
        self.shaper = shaper
        self.weights = weights
        self.difficulty_weights = section.difficulty_weights
        for name in (COMPONENTS, COMPONENT_WEIGHTS):
            self.columns.pop(name, None)

    def __call__(self, table: RewardTable) -> Tensor:
        advantages = super().__call__(table)
        if self.difficulty_weights:
            least, most = self.difficulty_weights
            solved = solved_share(*table.totals())[table["row"].unique(return_inverse=True)[1]]
            advantages = weighted_by_difficulty(advantages, solved, least=least, most=most)
        return advantages

    def gather(self, data: DataRanks, samples: Sequence[Sample], *, first_row: int) -> RewardTable:
        """Return the table of rewards, with a column for each component if there are any.

        One more collective is for the names of the components.
        """
        if COMPONENTS not in self.asked:
            return super().gather(data, samples, first_row=first_row)
        mine = {name for sample in samples for name in _components(sample, sample.reward)}
        names = sorted(set().union(*data.gather(mine)))
        columns = {f"{COMPONENTS}/{name}": partial(_component, name) for name in names}
        return RewardTable.share(data, samples, first_row=first_row, further=self.columns | columns)

    def inputs(self, table: RewardTable) -> tuple[Tensor, dict[str, Tensor]]:
        _, named = super().inputs(table)
        prefix = f"{COMPONENTS}/"
        if names := [name for name in table.columns if name.startswith(prefix)]:
            weights = [self._weight(name.removeprefix(prefix)) for name in names]
            # Rounded like shaped rewards, whose float64 sums are exact: equal ones have no spread.
            named[COMPONENTS] = torch.stack([table[name] for name in names], 1).float()
            named[COMPONENT_WEIGHTS] = torch.tensor(weights, dtype=torch.float64)
        rewards = self.shaper(table["reward"], table["group"].long(), table["response_length"])
        return rewards, named

    def _weight(self, component: str) -> float:
        """Return the weight of the reward that a component belongs to.

        A reward with named components has them as LABEL_NAME.
        """
        labels = [each for each in self.weights if f"{component}_".startswith(f"{each}_")]
        return self.weights[max(labels, key=len)] if labels else 1.0


def _components(sample: Sample, reward: float) -> dict[str, float]:
    """Return the named components of a reward.

    A response whose reward has no components, or that has several rewards, has one, `reward`.
    """
    named = sample.reward_components if sample.token_rewards is None else {}
    return named or {"reward": reward}


def _component(name: str, sample: Sample) -> list[float]:
    return [_components(sample, reward).get(name, 0.0) for _, reward in sample.steps]
