"""Collect the samples of a step: a scheduler chooses the prompts, and the engine answers them.

Rewards begin for a group as soon as its last response has ended, and score() waits for them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from lightrft.core.engine import derived_seed
from lightrft.core.groups import Group
from lightrft.core.metrics import Metrics, Untraced
from lightrft.core.order import Order, fair_owners
from lightrft.core.rewards import Rewards
from lightrft.core.sampler import RolloutLoop, Sampler
from lightrft.core.samples import Prompt, Sample
from lightrft.core.strategy import DataRanks


class Scheduler(Protocol):
    """Chooses a step's prompts and the groups to learn from, the same on all ranks."""

    def generate(self, step: int) -> Iterator[Group]:
        """Draw prompts and let the engine answer them, until the step has enough groups.

        Yield each of this rank's groups when the last response ends. All ranks generate together.
        """
        ...

    def selected(self, metrics: Metrics) -> list[Group]:
        """Return this rank's groups to learn from in this step, and measure how they were found.

        It is called once, after generate(), while the engine is still awake.
        """
        ...

    def scored(self, groups: list[Group]) -> Any:
        """Take note of the rewards of this rank's selected groups. All ranks call it together."""
        ...

    def snapshot(self) -> Callable[[], None]:
        """Return a function that undoes whatever the scheduler does from now on."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Rollout:
    """Collects the samples of each step and scores them."""

    scheduler: Scheduler
    rewards: Rewards

    def collect(self, step: int, metrics: Metrics) -> list[Group]:
        """Return this rank's complete groups of a step. The engine must be awake."""
        for group in self.scheduler.generate(step):
            # In worker processes rewards cost no time while the engine decodes.
            self.rewards.begin(group.responses)
        return self.scheduler.selected(metrics)

    def score(self, groups: list[Group]) -> list[Sample]:
        """Wait for the rewards of groups, and return the samples."""
        self.rewards.finish([sample for group in groups for sample in group.responses])
        self.scheduler.scored(groups)
        return [sample for group in groups for sample in group.samples]


class NextPrompts:
    """Takes the next prompts of the data in each step, and learns from every response."""

    def __init__(
        self,
        sampler: Sampler,
        prompts: Sequence[Prompt],
        *,
        data: DataRanks,
        num_prompts: int,
        begin: Callable[[int, int, Prompt], Group] | None = None,
        order: Order | None = None,
        seed: int = 0,
        trace: Untraced | None = None,
    ):
        """Set up the scheduler.

        `num_prompts` are the prompts of a step, of all ranks. `begin` makes a group of its number,
        the row in the data and the prompt; by default the sampler's parameters say how many samples
        it has. `order` is the order of the prompts; by default the seed
        shuffles them. `trace` measures how long this rank waits for others.
        """
        self.sampler = sampler
        self.prompts = prompts
        self.data = data
        self.num_prompts = num_prompts
        self.begin = begin or partial(Group.begin, count=sampler.sampling.n)
        self.order = order or Order(len(prompts), seed)
        self.seed = seed
        self.trace = trace or Untraced()
        self.position = 0
        """How many prompts have been drawn or passed over, in the order of the data."""
        self.number = 0
        """How many groups have begun."""
        self._groups: list[Group] = []
        """This rank's groups of the step."""

    def generate(self, step: int) -> Iterator[Group]:
        loop = self.sampler.open(derived_seed(self.seed, step, 0, 0))
        self._groups = self._draw(loop)
        yield from loop.steps()

        # Ranks wait here for the slowest one, where the trace counts the time as idle.
        with self.trace.phase("wait", idle=True):
            self.data.sum(torch.zeros(()))
        yield from loop.finish()

    def selected(self, metrics: Metrics) -> list[Group]:
        return self._groups

    def scored(self, groups: list[Group]) -> None:
        """Do nothing: which prompts come next depends on no reward."""

    def _draw(self, loop: RolloutLoop) -> list[Group]:
        """Draw the groups of a step; begin and return this rank's."""
        rows = self.order.rows(self.position, self.num_prompts)
        numbers = range(self.number + 1, self.number + 1 + len(rows))
        owners = fair_owners(self.data.size, [1.0] * len(rows))
        self.position += len(rows)
        self.number += len(rows)

        groups = [
            self.begin(number, row, self.prompts[row])
            for number, row, owner in zip(numbers, rows, owners, strict=True)
            if owner == self.data.rank
        ]
        loop.add([(group, range(len(group.responses))) for group in groups])
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same on all ranks."""
        return {"position": self.position, "number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.number = state["number"]

    def snapshot(self) -> Callable[[], None]:
        state = self.state_dict()
        return lambda: self.load_state_dict(state)
