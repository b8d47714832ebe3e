"""What a run adds to core/rollout.py: checkpoints, judges, and requests that are built ahead.

FixedBatch is the default scheduler: each step takes the next prompts of the data and learns from
every response.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from lightrft.algorithms.rollout.episode_roles import ROLE_MARK
from lightrft.algorithms.rollout.media_expansion import Expander
from lightrft.algorithms.rollout.sampler import RunSampler
from lightrft.config.errors import ConfigError
from lightrft.config.extras import LEDGER_SCHEDULER
from lightrft.config.sections import RolloutSection
from lightrft.core.engine import derived_seed
from lightrft.core.groups import Group
from lightrft.core.metrics import Metrics
from lightrft.core.order import fair_owners
from lightrft.core.rewards import Rewards
from lightrft.core.rollout import NextPrompts, Rollout
from lightrft.core.sampler import PendingRequest, RolloutLoop
from lightrft.core.samples import RIGHT, Prompt
from lightrft.registry import Registry

schedulers = Registry("scheduler", flag="--scheduler")
schedulers.register_deferred("rounds", "lightrft.algorithms.schedulers.rounds:Rounds")
schedulers.register_deferred("ledger", LEDGER_SCHEDULER)


class ResumableRollout(Rollout):
    """A rollout whose scheduler is an item of checkpoints.

    The state has the position in the data, the groups that have begun, and the last outcome of each
    prompt.
    """

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict() | {"kind": self._kind}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Raises ConfigError if another kind of scheduler has written it."""
        kind = state.pop("kind")
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


class JudgedRollout(ResumableRollout):
    """A rollout whose responses are read by a judge in the engine, while it is awake."""

    def collect(self, step: int, metrics: Metrics) -> list[Group]:
        groups = super().collect(step, metrics)
        self.rewards.ask_judge([sample for group in groups for sample in group.responses])
        return groups


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """The groups of a round, and the scheduler's position in the data once they are drawn.

    All ranks make the same plan.
    """

    drawn: list[tuple[int, int]]
    """(group number, row of the prompt) of all ranks."""
    ranks: list[int]
    """Rank of each group."""
    position: int
    """FixedBatch.position once the groups are drawn."""
    number: int
    """FixedBatch.number once the groups are drawn."""

    def share_of(self, rank: int) -> Iterator[tuple[int, int, range | None]]:
        """Yield (group number, row of the prompt, slots of responses) that a rank begins with.

        None stands for all slots.
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
    requests: list[PendingRequest] | None
    """None: what to ask is not known before the round begins."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Row -> reason for media that cannot be read; if there are any, nothing is prepared."""


# -- what is kept of a group once it is scored


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """Facts about a complete and scored group, known to every rank."""

    number: int
    row: int
    has_signal: bool
    """The samples differ in a reward, be it of one step, and not all of them are masked."""
    solved: float
    """Share of right responses."""
    length: float
    """Mean number of tokens of a response."""

    @classmethod
    def of(cls, group: Group) -> Self:
        samples = group.samples
        rewards = set()
        for sample in samples:
            named = sorted(sample.reward_components.items())
            of_roles = [item for item in named if ROLE_MARK in item[0]]
            rewards.add((*(reward for _, reward in sample.steps), *of_roles))
        has_signal = len(rewards) > 1 and not all(sample.masked for sample in samples)
        solved = sum(sample.reward > RIGHT for sample in samples) / len(samples)
        length = sum(len(sample.token_ids) for sample in samples) / len(samples)
        return cls(group.number, group.row, has_signal, solved, length)


class History:
    """The last outcome of each prompt, the same on all ranks."""

    def __init__(self, num_prompts: int):
        self.epochs = torch.full((num_prompts,), -1)
        """Epoch when each prompt was last drawn, [prompts] int64; -1 if it never was."""
        self.solved = torch.zeros(num_prompts)
        self.lengths = torch.zeros(num_prompts)
        self._former: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """Row that changed since snapshot() -> the values before the change."""

    def snapshot(self) -> Callable[[], None]:
        """Return a function that undoes everything recorded between now and the next call.

        Only rows that change are copied.
        """
        former = self._former = {}

        def rollback() -> None:
            for row, (epoch, solved, length) in former.items():
                self.epochs[row] = epoch
                self.solved[row] = solved
                self.lengths[row] = length

        return rollback

    def record(self, outcomes: Iterable[GroupOutcome], epoch: int) -> None:
        columns = (self.epochs, self.solved, self.lengths)
        for outcome in outcomes:
            row = outcome.row
            if row not in self._former:
                self._former[row] = tuple(column[row].clone() for column in columns)
            self.epochs[row] = epoch
            self.solved[row] = outcome.solved
            self.lengths[row] = outcome.length

    def expected_lengths(self, rows: list[int]) -> list[float]:
        """Return how many tokens to expect of a response to each prompt: as many as last time.

        New prompts get the mean of the others, or 1.
        """
        generated = self.epochs >= 0
        mean = float(self.lengths[generated].mean()) if generated.any() else 1.0
        return [max(float(self.lengths[row]) if generated[row] else mean, 1.0) for row in rows]

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "solved": self.solved, "lengths": self.lengths}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs.copy_(state["epochs"])
        self.solved.copy_(state["solved"])
        self.lengths.copy_(state["lengths"])


# -- the default scheduler


@schedulers.register("fixed_batch")
class FixedBatch(NextPrompts):
    """Takes the next `rollout_batch_size` prompts of the data in each step."""

    def __init__(
        self,
        sampler: RunSampler,
        rewards: Rewards,
        prompts: Sequence[Prompt],
        *,
        section: RolloutSection,
        greedy: bool = False,
        expander: Expander | None = None,
        **options: Any,
    ):
        """Set up the scheduler; the other options are as for NextPrompts.

        With `greedy` each group also gets the greedy response to the prompt. `expander` expands
        prompts with media for the trained model; None for text.
        """
        begin = partial(Group.begin, count=section.n_samples_per_prompt, others=greedy)
        super().__init__(
            sampler, prompts, num_prompts=section.rollout_batch_size, begin=begin, **options
        )
        self.rewards = rewards
        self.section = section
        self.greedy = greedy
        self.expander = expander

        self.history = History(len(prompts))
        self.deferred: list[tuple[int, int, int]] = []
        """(times deferred, group number, row) of groups that begin anew, the same on every rank."""
        self._prepared: PreparedRequests | None = None

    # -- a step

    def _draw(self, loop: RolloutLoop) -> list[Group]:
        prepared, self._prepared = self._prepared, None
        plan = prepared.plan if prepared else self._plan()
        groups = list((prepared.groups if prepared else self._local_groups(plan)).values())

        # The groups of the plan are drawn now.
        self.position = plan.position
        self.number = plan.number
        self.deferred = self.deferred[len(plan.drawn) :]

        if prepared and prepared.requests is not None:
            loop.begin(prepared.requests)
        else:
            loop.add([(group, group.slots) for group in groups])
        return groups

    def selected(self, metrics: Metrics) -> list[Group]:
        metrics.max("rollout/groups_carried", 0)
        return super().selected(metrics)

    def scored(self, groups: list[Group]) -> list[GroupOutcome]:
        """Record the outcomes of this rank's scored groups; return the outcomes of all ranks."""
        if self.greedy:
            for group in groups:
                for sample in group.samples:
                    sample.greedy_reward = group.others[0].reward

        shares = self.data.gather([GroupOutcome.of(group) for group in groups])
        outcomes = sorted(chain.from_iterable(shares), key=lambda outcome: outcome.number)
        epoch = self.position // self.order.num_rows
        self.history.record(outcomes, epoch)
        return outcomes

    # -- choosing the prompts

    def _plan(self) -> RolloutPlan:
        """Choose the groups of a round and balance them over the ranks; nothing is drawn yet."""
        size = self.num_prompts
        again = [(number, row) for _, number, row in self.deferred[:size]]
        count = size - len(again)
        rows = self.order.rows(self.position, count) if count else []
        drawn = [*again, *enumerate(rows, self.number + 1)]

        lengths = self.history.expected_lengths([row for _, row in drawn])
        responses = self.section.n_samples_per_prompt + self.greedy
        ranks = fair_owners(self.data.size, [length * responses for length in lengths])
        return RolloutPlan(drawn, ranks, self.position + count, self.number + count)

    def _local_groups(self, plan: RolloutPlan) -> dict[int, Group]:
        """Return group number -> group for the groups of a plan that begin on this rank."""
        return {
            number: self._group(number, row) for number, row, _ in plan.share_of(self.data.rank)
        }

    def _group(self, number: int, row: int) -> Group:
        return self.begin(number, row, self.prompts[row])

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
        prepared = self._prepared_round(plan, self._seed(step))
        self.trace.record("prepare", f"step {step}", began)
        return prepared

    def _seed(self, step: int, round: int = 0) -> int:
        return derived_seed(self.seed, step, round, 0)

    def _prepared_round(self, plan: RolloutPlan, seed: int) -> PreparedRequests:
        groups = self._local_groups(plan)
        share = plan.share_of(self.data.rank)
        begun = [(groups[number], slots or groups[number].slots) for number, _, slots in share]
        requests = self.sampler.prepare(begun, seed)
        if self.expander is not None:
            self.expander.prepare([group.prompt for group in groups.values()])
        return PreparedRequests(plan, groups, requests)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same on all ranks. Every other scheduler can continue from it."""
        return super().state_dict() | {
            "deferred": self.deferred,
            "history": self.history.state_dict(),
            "partial": [],
            "ranks": [],
            "num_ranks": self.data.size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Groups that another scheduler had begun start again."""
        begun = [(0, group["number"], group["row"]) for group in state["partial"]]
        self._restore(state["position"], state["number"], [*begun, *state["deferred"]])
        self.history.load_state_dict(state["history"])

    def snapshot(self) -> Callable[[], None]:
        progress = self.position, self.number, self.deferred
        restore_history = self.history.snapshot()

        def rollback() -> None:
            self._restore(*progress)
            restore_history()

        return rollback

    def _restore(
        self, position: int, number: int, deferred: Sequence[tuple[int, int, int]]
    ) -> None:
        self._prepared = None
        self.position = position
        self.number = number
        self.deferred = [tuple(each) for each in deferred]
