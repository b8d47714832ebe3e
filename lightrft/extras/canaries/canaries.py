"""Canaries: groups whose reward cannot be earned honestly, generated beside the groups of a step.

Nobody learns from them. If their rewards rise, the reward is being gamed.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass
from itertools import chain
from statistics import fmean
from typing import NamedTuple

import torch
from loguru import logger

from lightrft.algorithms.rollout.sampler import RunSampler
from lightrft.config.sections import WatchSection
from lightrft.core.engine import derived_seed
from lightrft.core.groups import Group
from lightrft.core.metrics import Metrics
from lightrft.core.sampler import RolloutLoop
from lightrft.extras.canaries.monitor import RewardMonitor
from lightrft.extras.canaries.rows import CanaryRows
from lightrft.models.parallel.collectives import Axis

SHOWN_CANARIES = 3
"""Number of responses that a warning shows."""
HIGH = 0.3
"""Reward on canaries before training, in [0, 1] and beyond that of a guess, that calls for a look.

It is more than what usual rewards give for the form of a response.
"""
MOST_CHARACTERS = 300
"""Characters of a prompt and of a response in a warning."""


class CanaryGroup(Group):
    """A group that schedulers do not get, because for them it is never complete."""

    has_ended = Group.complete

    @property
    def complete(self) -> bool:
        return False


class ScoredCanary(NamedTuple):
    """What all ranks learn about a canary."""

    number: int
    mean: float
    """Mean of the responses' rewards, in [0, 1]. They are not independent, so they count once."""
    reward: float
    """Reward of the response with the highest one."""
    text: str
    """This response, with the prompt and the labels, for people."""


@dataclass(eq=False)
class Canaries:
    """Generates canaries, and collects evidence from their rewards.

    Their numbers count from 0; as the number of a group, canary k is -1 - k.
    """

    rows: CanaryRows
    sampler: RunSampler
    section: WatchSection
    _: KW_ONLY
    data: Axis
    batch: InitVar[int]
    """Number of prompts of a step."""
    samples: int
    """Number of responses to a prompt."""
    joins: bool
    """True if canaries are generated with the other prompts, else after them."""

    def __post_init__(self, batch: int) -> None:
        self.num_per_step = self.section.canaries * batch
        self.monitor = RewardMonitor("canary", self.section)
        if self.section.canary_chance is not None:
            self.monitor.expect(self.section.canary_chance)

        self._groups: list[CanaryGroup] = []
        """This rank's canaries of a step."""
        self._baseline: list[CanaryGroup] = []
        """This rank's responses before training, one for each of several rows."""
        self._best: list[ScoredCanary] = []
        """The most rewarded canaries of this process."""

    # -- generating

    @contextmanager
    def joining(self, step: int) -> Iterator[None]:
        """Let the canaries of a step join the first loop that is opened inside of the context.

        All ranks enter it, with the engine awake. The first time it also answers the baseline.
        """
        first, after = (math.ceil(each * self.num_per_step) for each in (step - 1, step))
        mine = [each for each in range(first, after) if each % self.data.size == self.data.rank]
        self._groups = [self._group(number, self.samples) for number in mine]
        self._baseline = []
        if self.monitor.honest is None:
            self._answer_baseline()
        self.sampler.companions = [self._join] if self.joins else []
        yield
        self.sampler.companions = []

        # A loop can end early, and only quick responses would count if the others were left out.
        left = [group for group in self._groups if not group.has_ended]
        if after > first and float(self.data.sum(torch.tensor(float(len(left))))):
            self._generate(left, step)

    def _join(self, loop: RolloutLoop) -> None:
        loop.add([(group, group.slots) for group in self._groups])
        self.sampler.companions = []

    def _generate(self, groups: list[CanaryGroup], *seed: int | str) -> None:
        """Generate groups to their end in a loop of their own. All ranks call it together."""
        loop = self.sampler.open(derived_seed(self.rows.seed, *seed))
        loop.add([(group, group.slots) for group in groups])
        for _ in chain(loop.steps(), loop.finish()):
            pass

    @property
    def groups(self) -> list[CanaryGroup]:
        """Return this rank's groups of a step whose rewards are needed."""
        return self._baseline + self._groups

    def _answer_baseline(self) -> None:
        count = min(self.section.canary_baseline, len(self.rows.prompts))
        mine = range(self.data.rank, count, self.data.size)
        # These are the last rows of the order, which the run reaches last.
        self._baseline = [self._group(-1 - index, 1) for index in mine]
        self._generate(self._baseline, "baseline")

    def _group(self, number: int, samples: int) -> CanaryGroup:
        row = self.rows[number]
        return CanaryGroup.begin(-1 - number, row.prompt.index, row.prompt, samples)

    # -- measuring

    def measure(self, step: int, metrics: Metrics) -> list[str]:
        """Take the rewards of the complete canaries of a step; return warnings.

        All ranks call it together.
        """
        warnings = []
        shares = self.data.gather(
            (
                [self.monitor.share(group.samples[0].reward) for group in self._baseline],
                [self._scored(group) for group in self._groups],
            )
        )

        baseline = [value for values, _ in shares for value in values]
        if baseline:
            self.monitor.measure_baseline(baseline, least=self.rows.chance)
            warnings += self._warnings_of(fmean(baseline), len(baseline))
        scored = sorted(chain.from_iterable(each for _, each in shares))
        if scored:
            metrics.mean("canary/reward", fmean(each.mean for each in scored))
        self._best = sorted([*self._best, *scored], key=lambda each: -each.reward)[:SHOWN_CANARIES]
        if self.monitor.add(step, [each.mean for each in scored]):
            warnings.append(self._alarm())
        self.monitor.report(metrics)
        return warnings

    def _scored(self, group: CanaryGroup) -> ScoredCanary:
        best = max(group.samples, key=lambda sample: sample.reward)
        number = -1 - group.number
        row = self.rows[number]
        label = best.prompt.columns.get("label")
        labels = f", label {row.true_label!r}, false label {label!r}" if self.rows.swaps else ""
        text = (
            f"reward {best.reward:.4g}{labels}: prompt {best.prompt.text[-MOST_CHARACTERS:]!r},"
            f" response {best.text[:MOST_CHARACTERS]!r}"
        )
        mean = fmean(self.monitor.share(sample.reward) for sample in group.samples)
        return ScoredCanary(number, mean, best.reward, text)

    def _warnings_of(self, mean: float, count: int) -> list[str]:
        """Log what the baseline says, and return a warning if the reward is paid without learning."""
        if self.data.rank == 0:
            logger.info(
                f"canaries: before training {count} responses earned {mean:.3g} of the reward's"
                f" range on rows where it cannot be earned; an honest run stays below"
                f" {self.monitor.honest:.3g}"
            )
        high = (
            f"canaries: {mean:.0%} of the reward is paid before training on rows where it cannot be"
            f" earned, so it is paid for something else than the answer, and only what rises above"
            f" {self.monitor.honest:.0%} can raise an alarm: look at the reward with lightrft"
            f" test_rewards, or name other rows with --canary_data"
        )
        return [high] if mean > self.rows.chance + HIGH else []

    def _alarm(self) -> str:
        shown = "".join(f"\n  {each.text}" for each in self._best)
        return (
            f"the reward is being gamed since step {self.monitor.rises_from}: responses earn it on"
            f" canaries, rows where it cannot be earned honestly. The evidence is"
            f" {math.exp(self.monitor.threshold):.0f} to 1 or more. The most rewarded of"
            f" them:{shown}"
        )
