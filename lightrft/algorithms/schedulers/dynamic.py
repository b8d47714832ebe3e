"""Replace groups whose responses all have the same reward (DAPO, arXiv 2503.14476)."""

from loguru import logger

from lightrft.algorithms.rollout.rollout import GroupOutcome
from lightrft.config.errors import ConfigError
from lightrft.core.groups import Group
from lightrft.core.metrics import Metrics

LEAST_ACCEPTANCE = 0.25
"""Lowest acceptance to count on: a round draws at most four prompts for one that is missing."""


class DynamicSampling:
    """Sorts the groups of a step into those with a signal and those without, over all rounds."""

    def __init__(self, size: int, most_rounds: int):
        self.size = size
        self.most_rounds = most_rounds
        self.chosen: set[int] = set()
        """Numbers of groups to learn from."""
        self.without_signal: list[int] = []
        """Numbers of groups without a signal."""

    @property
    def missing(self) -> int:
        """Return the number of groups that the step still needs."""
        return self.size - len(self.chosen)

    @property
    def acceptance(self) -> float:
        """Return what share of a round's groups can be expected to have a signal."""
        tried = len(self.chosen) + len(self.without_signal)
        return max(len(self.chosen) / tried, LEAST_ACCEPTANCE) if tried else 1.0

    def take(self, outcomes: list[GroupOutcome]) -> None:
        """Take the outcomes of a round, sorted by group number."""
        with_signal = [each.number for each in outcomes if each.has_signal]
        self.without_signal += [each.number for each in outcomes if not each.has_signal]
        self.chosen.update(with_signal[: self.missing])

    def report(self, metrics: Metrics, num_rounds: int) -> None:
        metrics.max("rollout/sampling_rounds", num_rounds)
        metrics.max("rollout/groups_given_up", len(self.without_signal))

    def fill(self, groups: list[Group], *, warns: bool) -> set[int]:
        """Choose groups without a signal to fill up the step; return their numbers.

        They are masked among `groups`, so that nothing is learned from them. Raises ConfigError if
        no group of any round has a signal.
        """
        if not self.chosen:
            raise ConfigError(
                f"--dynamic_sampling: {len(self.without_signal)} prompts in {self.most_rounds}"
                " rounds, and for each of them all responses got the same reward: there is no training"
                " signal. Are the data far too easy or too hard, or is the reward constant? `lightrft"
                " evaluate` shows responses; --dynamic_sampling_rounds allows more rounds"
            )

        if self.missing and warns:
            logger.warning(
                f"dynamic sampling: {self.missing} of {self.size} groups have no signal after"
                f" {self.most_rounds} rounds"
            )

        # Every rank has the same sorted numbers, so all of them choose the same substitutes.
        substitutes = set(sorted(self.without_signal)[: self.missing])
        for group in groups:
            if group.number in substitutes:
                for sample in group.samples:  # nothing is learned from them
                    sample.masked = True
        return substitutes
