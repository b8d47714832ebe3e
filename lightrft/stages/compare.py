"""Compare the rewards of all ranks, to find the advantage that each reward adds to the tokens."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightrft.algorithms.advantage import Estimator, estimators, weighted_by_difficulty
from lightrft.algorithms.options import keywords, options_of, resolve
from lightrft.algorithms.shaping import RewardShaper
from lightrft.config.sections import AlgorithmSection
from lightrft.rollout.gathered_rewards import GatheredRewards

GIVEN = {"lengths", "responses", "greedy_rewards", "components", "component_weights"}
"""Options of an estimator that come from the samples, not from the configuration."""


class CompareRewards:
    """Calls the estimator of --advantage_estimator with the shaped rewards of all ranks.

    Rewards are shaped first, so that no statistic covers only one rank.
    """

    def __init__(
        self, section: AlgorithmSection, shaper: RewardShaper, weights: Mapping[str, float]
    ):
        """Find the estimator. Raises ValueError if it needs what this run does not compute.

        `weights` has the weight of each reward by label.
        """
        self.section = section
        self.shaper = shaper if shaper.is_enabled else None
        self.weights = weights
        self.estimator: Estimator = resolve(estimators, section.advantage_estimator, extra=GIVEN)
        self.options = options_of(self.estimator, section)
        self.given = keywords(self.estimator).keys() & GIVEN
        self.reads_components = "components" in self.given

    def __call__(self, gathered: GatheredRewards) -> Tensor:
        """Return the advantage of each reward: [M]."""
        groups = gathered.groups.long()
        rewards = gathered.rewards.float()
        if self.shaper is not None:
            rewards = self.shaper(gathered.rewards, groups, gathered.response_lengths)
        given = {
            "lengths": gathered.lengths,
            "responses": gathered.rows,
            "greedy_rewards": gathered.greedy.float(),
        }
        if self.reads_components:
            # Rounded like shaped rewards, whose float64 sums are exact: equal parts have no spread.
            given["components"] = torch.stack([*gathered.components.values()], 1).float()
            weights = [self._weight(name) for name in gathered.components]
            given["component_weights"] = torch.tensor(weights, dtype=torch.float64)

        arguments = self.options | {name: given[name] for name in self.given & given.keys()}
        advantages = self.estimator(rewards, groups, **arguments)

        # Estimators may be the user's own, and a NaN would only show up as a broken model.
        if advantages.shape != rewards.shape or not advantages.isfinite().all():
            raise ValueError(
                f"--advantage_estimator {self.section.advantage_estimator} returns"
                f" {advantages!r:.200}, but must return a finite advantage for each of the"
                f" {len(rewards)} rewards"
            )

        if self.section.difficulty_weights:
            least, most = self.section.difficulty_weights
            solved = gathered.solved_shares()
            advantages = weighted_by_difficulty(advantages, solved, least=least, most=most)
        return advantages

    def _weight(self, component: str) -> float:
        """Return the weight of the reward that a component belongs to.

        A reward with named parts has components LABEL_NAME.
        """
        labels = [each for each in self.weights if f"{component}_".startswith(f"{each}_")]
        return self.weights[max(labels, key=len)] if labels else 1.0
