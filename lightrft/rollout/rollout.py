"""Collect the samples of a step: a scheduler chooses the prompts, and the engine answers them.

The reward function is called for a group as soon as its last response has ended, and score() waits
for the results. FixedBatch is the default scheduler: each step takes the next prompts of the data
and learns from every response.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from lightrft.config.errors import ConfigError
from lightrft.config.sections import RolloutSection
from lightrft.core.groups import Group
from lightrft.core.metrics import Metrics, Untraced
from lightrft.core.samples import Prompt, Sample
from lightrft.data.loader import Blend, Order, fair_owners
from lightrft.engine.requests import derived_seed
from lightrft.parallel.collectives import Axis
from lightrft.registry import Registry
from lightrft.rewards.runner import RewardRunner
from lightrft.rollout.groups import GroupOutcome, History
from lightrft.rollout.media_expansion import Expander
from lightrft.rollout.sampler import Requests, Sampler

schedulers = Registry("scheduler", flag="--scheduler")
schedulers.register_deferred("rounds", "lightrft.schedulers.rounds:Rounds")


class Scheduler(Protocol):
    """Chooses a step's prompts and the groups to learn from, the same on all ranks.

    FixedBatch is the default; the others are in lightrft/schedulers. A class of a user is called
    with the sampler, the rewards and the prompts, and with those keywords of FixedBatch and fields
    of the rollout section that it names.
    """

    def generate(self, step: int) -> Iterator[Group]:
        """Draw prompts and let the engine answer them, until the step has enough groups.

        Yield each of this rank's groups when the last response ends. All ranks generate together.
        """
        ...

    def selected(self, metrics: Metrics) -> list[Group]:
        """Return this rank's groups to learn from in this step, and measure how they were found.

        It is called once, after generate(), while the engine is still awake: with --max_staleness
        the responses of later steps begin here.
        """
        ...

    def finish_rewards(self, groups: list[Group]) -> list[GroupOutcome]:
        """Wait for the rewards of this rank's groups; return the outcomes of all ranks."""
        ...

    def preparing(self, step: int) -> AbstractContextManager[None]:
        """Prepare the first round of a step in another thread during the context."""
        ...

    def snapshot(self) -> Callable[[], None]:
        """Return a function that undoes whatever the scheduler does from now on."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Rollout:
    """Collects the samples of each step and scores them.

    A checkpoint holds the scheduler's state: the place in the data, the groups that have begun, and
    the last outcome of each prompt.
    """

    def __init__(self, scheduler: Scheduler, rewards: RewardRunner):
        self.scheduler = scheduler
        self.rewards = rewards

    def collect(self, step: int, metrics: Metrics) -> list[Group]:
        """Return this rank's complete groups of a step. The engine must be awake.

        All ranks together return `rollout_batch_size` groups. Raises ConfigError with
        --dynamic_sampling if no group of any round has a signal.
        """
        for group in self.scheduler.generate(step):
            # Rewards run in worker processes, so they cost no time while the engine decodes.
            self.rewards.begin(group.responses)
        return self.scheduler.selected(metrics)

    def score(self, groups: list[Group], metrics: Metrics) -> list[Sample]:
        """Wait for the rewards of groups, and return the samples."""
        self.scheduler.finish_rewards(groups)
        self.rewards.count_failures("rollout/reward_failures", metrics)
        return [sample for group in groups for sample in group.samples]

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict() | {"kind": self._kind}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Raises ConfigError if another kind of scheduler has written it."""
        kind = state.pop("kind", FixedBatch.__name__)
        if kind != self._kind:
            raise ConfigError(
                f"the checkpoint has the state of the scheduler {kind}, and --scheduler"
                f" {type(self.scheduler).__name__} cannot continue from it"
            )
        self.scheduler.load_state_dict(state)

    @property
    def _kind(self) -> str:
        """Return FixedBatch for all schedulers that extend it: each continues from any other."""
        cls = FixedBatch if isinstance(self.scheduler, FixedBatch) else type(self.scheduler)
        return cls.__name__


class JudgedRollout(Rollout):
    """A rollout whose responses a judge in the engine reads while the engine is awake."""

    def collect(self, step: int, metrics: Metrics) -> list[Group]:
        groups = super().collect(step, metrics)
        self.rewards.ask_judge([sample for group in groups for sample in group.responses])
        return groups


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """The groups of a round, and the scheduler's place in the data once they are drawn.

    All ranks make the same plan.
    """

    drawn: list[tuple[int, int]]
    """(group number, row of the prompt) of all ranks."""
    ranks: list[int]
    """Rank of each group."""
    place: int
    """FixedBatch.place once the groups are drawn."""
    number: int
    """FixedBatch.number once the groups are drawn."""

    def parts_of(self, rank: int) -> Iterator[tuple[int, int, range | None]]:
        """Yield (group number, row of the prompt, places of responses) that a rank begins with.

        None stands for all places.
        """
        for (number, row), owner in zip(self.drawn, self.ranks, strict=True):
            if owner == rank:
                yield number, row, None


@dataclass(frozen=True, slots=True)
class PreparedRequests:
    """The first round of a later step: this rank's groups and the requests for their responses."""

    plan: RolloutPlan
    groups: dict[int, Group]
    """Group number -> group."""
    requests: Requests


@schedulers.register("fixed_batch")
class FixedBatch:
    """Takes the next `rollout_batch_size` prompts of the data in each step."""

    def __init__(
        self,
        sampler: Sampler,
        rewards: RewardRunner,
        prompts: Sequence[Prompt],
        *,
        section: RolloutSection,
        data: Axis,
        seed: int,
        greedy: bool = False,
        order: Order | Blend | None = None,
        expander: Expander | None = None,
        trace: Untraced | None = None,
    ):
        """Set up the scheduler.

        With `greedy` each group also gets the greedy response to the prompt. `order` is the order
        of the prompts; by default the seed shuffles them. `expander` expands prompts with media
        for the trained model; None for text. `trace` measures how long this rank waits for others.
        """
        self.sampler = sampler
        self.rewards = rewards
        self.prompts = prompts
        self.section = section
        self.data = data
        self.seed = seed
        self.greedy = greedy
        self.order = order or Order(len(prompts), seed)
        self.expander = expander
        self.trace = trace or Untraced()

        self.history = History(len(prompts))
        self.place = 0
        """How many prompts have been drawn or passed over, in the order of the data."""
        self.number = 0
        """How many groups have begun."""
        self.deferred: list[tuple[int, int, int]] = []
        """(times deferred, group number, row) of groups that begin anew, the same on every rank."""
        self._prepared: PreparedRequests | None = None
        self._groups: list[Group] = []
        """This rank's groups of the step."""

    # -- a step

    def generate(self, step: int) -> Iterator[Group]:
        loop = self.sampler.open(self._seed(step, 0))
        prepared, self._prepared = self._prepared, None
        plan = prepared.plan if prepared else self._plan()
        groups = prepared.groups if prepared else self._local_groups(plan)
        self._groups = list(groups.values())

        # The groups of the plan are drawn now.
        self.place = plan.place
        self.number = plan.number
        self.deferred = self.deferred[len(plan.drawn) :]

        loop.add(
            [(group, group.places) for group in self._groups], prepared.requests if prepared else {}
        )
        yield from loop.steps()

        # Ranks wait here for the slowest one, where the trace counts the time as idle.
        with self.trace.phase("wait", idle=True):
            self.data.sum(torch.zeros(()))
        yield from loop.finish()

    def selected(self, metrics: Metrics) -> list[Group]:
        metrics.max("rollout/groups_carried", 0)
        return self._groups

    def finish_rewards(self, groups: list[Group]) -> list[GroupOutcome]:
        self.rewards.finish([sample for group in groups for sample in group.responses])
        if self.greedy:
            for group in groups:
                for sample in group.samples:
                    sample.greedy_reward = group.others[0].reward

        parts = self.data.gather([GroupOutcome.of(group) for group in groups])
        outcomes = sorted(chain.from_iterable(parts), key=lambda outcome: outcome.number)
        epoch = self.place // self.order.num_rows
        self.history.record(outcomes, epoch)
        return outcomes

    # -- choosing the prompts

    def _plan(self) -> RolloutPlan:
        """Choose the groups of a round and balance them over the ranks; nothing is drawn yet."""
        size = self.section.rollout_batch_size
        again = [(number, row) for _, number, row in self.deferred[:size]]
        count = size - len(again)
        rows = self.order.rows(self.place, count) if count else []
        drawn = [*again, *enumerate(rows, self.number + 1)]

        lengths = self.history.expected_lengths([row for _, row in drawn])
        responses = self.section.n_samples_per_prompt + self.greedy
        ranks = fair_owners(self.data.size, [length * responses for length in lengths])
        return RolloutPlan(drawn, ranks, self.place + count, self.number + count)

    def _local_groups(self, plan: RolloutPlan) -> dict[int, Group]:
        """Return group number -> group for the groups of a plan that begin on this rank."""
        return {
            number: self._group(number, row) for number, row, _ in plan.parts_of(self.data.rank)
        }

    def _group(self, number: int, row: int) -> Group:
        count = self.section.n_samples_per_prompt
        return Group.begin(number, row, self.prompts[row], count, others=self.greedy)

    def _seed(self, step: int, round: int) -> int:
        return derived_seed(self.seed, step, round, 0)

    # -- preparing

    @contextmanager
    def preparing(self, step: int) -> Iterator[None]:
        """Prepare the first round of a step in a thread: prompts, media, and requests.

        Which prompts come next is known once the step before is scored. Nothing is drawn
        meanwhile, and the engine must do nothing else.
        """
        with ThreadPoolExecutor(1, "prepare") as thread:
            future = thread.submit(self._prepare, step)
            yield
            with self.trace.phase("prepare"):
                self._prepared = future.result()

    def _prepare(self, step: int) -> PreparedRequests:
        began = time.perf_counter()
        plan = self._plan()
        prepared = self._prepared_round(plan, self._seed(step, 0))
        self.trace.record("prepare", f"step {step}", began)
        return prepared

    def _prepared_round(self, plan: RolloutPlan, seed: int) -> PreparedRequests:
        groups = self._local_groups(plan)
        parts = [
            (groups[number], places or groups[number].places)
            for number, _, places in plan.parts_of(self.data.rank)
        ]
        requests = self.sampler.prepare(parts, seed)
        if self.expander is not None:
            self.expander.prepare([group.prompt for group in groups.values()])
        return PreparedRequests(plan, groups, requests)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same on all ranks. Every other scheduler can continue from it."""
        return {
            "place": self.place,
            "number": self.number,
            "parked": self.deferred,
            "history": self.history.state_dict(),
            "carried": [],
            "ranks": [],
            "num_ranks": self.data.size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Groups that another scheduler had begun start again."""
        begun = [(0, group["number"], group["row"]) for group in state["carried"]]
        self._restore(state["place"], state["number"], [*begun, *state.get("parked", ())])
        self.history.load_state_dict(state["history"])

    def snapshot(self) -> Callable[[], None]:
        position = self.place, self.number, self.deferred
        restore_history = self.history.snapshot()

        def rollback() -> None:
            self._restore(*position)
            restore_history()

        return rollback

    def _restore(self, place: int, number: int, deferred: Sequence[tuple[int, int, int]]) -> None:
        self._prepared = None
        self.place = place
        self.number = number
        self.deferred = [tuple(each) for each in deferred]
