"""A second, stricter reward of a share of the samples, which nobody learns from.

If the reward rises more than it does, the reward is being gamed.
"""

from dataclasses import replace
from itertools import chain
from statistics import fmean

from lightrft.config.sections import WatchSection
from lightrft.core.groups import Group
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Sample
from lightrft.extras.canaries.monitor import RewardMonitor
from lightrft.models.parallel.collectives import Axis
from lightrft.rewards.runner import RewardRunner


class Shadow:
    """Compares the reward with the shadow reward, group by group.

    The groups of the first steps say how far both are apart before training.
    """

    def __init__(self, rewards: RewardRunner, section: WatchSection, data: Axis, samples: int):
        """Set up the shadow; a group has `samples` responses."""
        self.rewards = rewards
        self.section = section
        self.data = data
        self.samples = samples
        self.monitor = RewardMonitor("shadow", section)
        self._pairs: list[tuple[Group, list[Sample]]] = []
        """This rank's groups, with the samples that have the shadow reward."""

    def begin(self, groups: list[Group]) -> None:
        """Begin to compute the shadow reward of a share of this rank's groups."""
        share = 1.0 if self.monitor.honest is None else self.section.shadow_share
        self._pairs = [
            (
                group,
                [replace(sample, reward_components={}, masked=False) for sample in group.samples],
            )
            for group in groups
            if int(group.number * share) > int((group.number - 1) * share)
        ]
        for _, copies in self._pairs:
            self.rewards.begin(copies)

    def finish(self) -> None:
        """Wait for the shadow rewards. All ranks call it together."""
        self.rewards.finish([sample for _, copies in self._pairs for sample in copies])

    def measure(self, step: int, metrics: Metrics) -> list[str]:
        """Take the differences of a step; return the warning of an alarm. All ranks call it."""
        shares = self.data.gather(
            [
                (group.number, self._difference(group.samples, copies))
                for group, copies in self._pairs
                if not any(sample.masked for sample in copies)
            ]
        )
        values = [value for _, value in sorted(chain.from_iterable(shares))]
        if values:
            width = self.monitor.high - self.monitor.low
            metrics.mean("shadow/gap", (2 * fmean(values) - 1) * width)

        warnings, baseline = [], self.monitor.baseline
        if self.monitor.honest is None:
            baseline += values
            if len(baseline) * self.samples >= self.section.canary_baseline:
                self.monitor.measure_baseline(baseline)
        elif self.monitor.add(step, values):
            warnings.append(
                f"the reward is being gamed since step {self.monitor.rises_from}: it has risen"
                f" above --shadow_reward {self.section.shadow_reward} by more than both differed"
                " before training"
            )
        self.monitor.report(metrics)
        return warnings

    def _difference(self, samples: list[Sample], copies: list[Sample]) -> float:
        """Return how far the reward is above the shadow reward: 1/2 if they are equal."""
        share = self.monitor.share
        gaps = [share(a.reward) - share(b.reward) for a, b in zip(samples, copies, strict=True)]
        return (fmean(gaps) + 1) / 2
