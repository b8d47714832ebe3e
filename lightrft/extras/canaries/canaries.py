"""Canaries: groups whose reward cannot be earned honestly, generated beside the groups of a step.

Nobody learns from them. If their rewards rise, the reward is being gamed.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

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
HIGH = 0.7
"""Reward on canaries before training, in [0, 1], from which there is nothing left to find."""
MOST_CHARACTERS = 300
"""Characters of a prompt and of a response in a warning."""


class CanaryGroup(Group):
    """A group that schedulers do not get, because for them it is never complete."""

    has_ended = Group.complete

    @property
    def complete(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ScoredCanary:
    """What all ranks learn about a canary."""

    number: int
    mean: float
    """Mean of the responses' rewards, in [0, 1]. They are not independent, so they count once."""
    reward: float
    """Reward of the response with the highest one."""
    text: str
    """This response, with the prompt and the labels, for people."""


class Canaries:
    """Generates canaries, and collects evidence from their rewards.

    Their numbers count from 0; as the number of a group, canary k is -1 - k.
    """

    def __init__(
        self,
        rows: CanaryRows,
        sampler: RunSampler,
        section: WatchSection,
        *,
        data: Axis,
        batch: int,
        samples: int,
    ):
        """Set up the canaries. `batch` are the prompts of a step, each with `samples` responses."""
        self.rows = rows
        self.sampler = sampler
        self.section = section
        self.data = data
        self.num_per_step = section.canaries * batch
        self.samples = samples
        self.monitor = RewardMonitor("canary", section)
        if section.canary_chance is not None:
            self.monitor.expect(section.canary_chance)

        self.unfinished: list[int] = []
        """Numbers of canaries that earlier steps have begun, the same on all ranks."""
        self._due: list[int] = []
        """Numbers of the canaries of this step."""
        self._groups: dict[int, CanaryGroup] = {}
        """Number of a canary of this rank -> its group."""
        self._loops: dict[int, RolloutLoop] = {}
        """Number -> loop that generates it."""
        self._baseline: list[CanaryGroup] = []
        """This rank's responses before training, one for each of several rows."""
        self._best: list[ScoredCanary] = []
        """The most rewarded canaries since the evidence began to grow."""

    # -- generating

    @contextmanager
    def joining(self, step: int) -> Iterator[None]:
        """Let the canaries of a step join the loops that are opened inside of the context.

        All ranks enter it, with the engine awake. The first time it also answers the baseline.
        """
        begun = range(
            math.ceil((step - 1) * self.num_per_step), math.ceil(step * self.num_per_step)
        )
        self._due = [*self.unfinished, *begun]
        self._baseline = []
        if self.monitor.honest is None:
            self._answer_baseline()

        self.sampler.companions.append(self._join)
        try:
            yield
        finally:
            self.sampler.companions.remove(self._join)

    def _join(self, loop: RolloutLoop) -> None:
        """Let a loop generate the canaries that are due and that no other loop generates."""
        groups = []
        for number in self._due:
            if number % self.data.size != self.data.rank:
                continue
            if (former := self._loops.get(number)) is not None:
                running = {group for group, _ in former.running()}
                if self._groups[number].has_ended or -1 - number in running:
                    continue
            # A round can end before a response does: then the canary begins anew.
            group = self._groups[number] = self._group(number, self.samples)
            self._loops[number] = loop
            groups.append((group, group.slots))
        loop.add(groups)

    def ended(self) -> list[CanaryGroup]:
        """Return this rank's canaries that have ended and are not measured yet."""
        ended = [self._groups[number] for number in self._due if number in self._groups]
        return [*self._baseline, *(group for group in ended if group.has_ended)]

    def _answer_baseline(self) -> None:
        count = min(self.section.canary_baseline, len(self.rows.prompts))
        mine = range(self.data.rank, count, self.data.size)
        # These are the last rows of the order, which the run reaches last.
        self._baseline = [self._group(-1 - index, 1) for index in mine]
        loop = self.sampler.open(derived_seed(self.rows.seed, "baseline"))
        loop.add([(group, group.slots) for group in self._baseline])
        for _ in chain(loop.steps(), loop.finish()):
            pass

    def _group(self, number: int, samples: int) -> CanaryGroup:
        row = self.rows[number]
        return CanaryGroup.begin(-1 - number, row.prompt.index, row.prompt, samples)

    # -- measuring

    def measure(self, step: int, metrics: Metrics) -> bool:
        """Take the rewards of the complete canaries of a step; return True at the alarm.

        All ranks call it together.
        """
        shares = self.data.gather(
            (
                [self.monitor.share(group.samples[0].reward) for group in self._baseline],
                [
                    self._scored(number, group)
                    for number, group in self._groups.items()
                    if group.has_ended
                ],
            )
        )
        baseline = [value for values, _ in shares for value in values]
        if baseline:
            self.monitor.measure_baseline(baseline, least=self.rows.chance)
            if self.data.rank == 0:
                self._tell_baseline(fmean(baseline), len(baseline))
        scored = sorted(
            chain.from_iterable(each for _, each in shares), key=lambda each: each.number
        )
        done = {each.number for each in scored}
        self.unfinished = [number for number in self._due if number not in done]
        for number in done:
            self._groups.pop(number, None)
            self._loops.pop(number, None)

        alarm = self.monitor.add(step, [each.mean for each in scored])
        if scored:
            metrics.mean("canary/reward", fmean(each.mean for each in scored))
        self.monitor.report(metrics)
        self._best = sorted([*self._best, *scored], key=lambda each: -each.reward)[:SHOWN_CANARIES]
        if alarm and self.data.rank == 0:
            self._tell_alarm()
        return alarm

    def _scored(self, number: int, group: CanaryGroup) -> ScoredCanary:
        best = max(group.samples, key=lambda sample: sample.reward)
        row = self.rows[number]
        label = best.prompt.columns.get("label")
        labels = f", label {row.true_label!r}, false label {label!r}" if self.rows.swaps else ""
        text = (
            f"reward {best.reward:.4g}{labels}: prompt {best.prompt.text[-MOST_CHARACTERS:]!r},"
            f" response {best.text[:MOST_CHARACTERS]!r}"
        )
        mean = fmean(self.monitor.share(sample.reward) for sample in group.samples)
        return ScoredCanary(number, mean, best.reward, text)

    def _tell_baseline(self, mean: float, count: int) -> None:
        logger.info(
            f"canaries: before training {count} responses earned {mean:.3g} of the reward's range"
            f" on rows where it cannot be earned; an honest run stays below"
            f" {self.monitor.honest:.3g}"
        )
        if mean > HIGH:
            logger.warning(
                "canaries: the reward is high without training on rows where it cannot be earned,"
                " so hardly anything can raise an alarm: does the reward read the label"
                " (lightrft test_rewards)? --canary_data takes other rows"
            )

    def _tell_alarm(self) -> None:
        shown = "".join(f"\n  {each.text}" for each in self._best)
        logger.warning(
            f"the reward is being gamed, since step {self.monitor.rises_from}: responses earn it on"
            f" canaries, rows where it cannot be earned honestly. The evidence is"
            f" {math.exp(self.monitor.threshold):.0f} to 1 or more. The most rewarded of"
            f" them:{shown}"
        )
