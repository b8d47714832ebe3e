"""Fill a step in rounds: the scheduler of all options that FixedBatch does not know.

The last option of this list is in this file, and each other one has a file beside it:

- dynamic sampling (--dynamic_sampling): other prompts replace groups of equal rewards, in rounds
- over-sampling (--over_sampling): a round starts more prompts than needed and stops as soon as
  enough groups are complete; see open_round.py. With --rollout_schedule tail_rounds the rest begins
  anew later
- --rollout_schedule longest_first: ranks share the responses to a prompt, and those that are
  expected to be longest begin first; see assignment.py and divided.py
- partial rollouts (--partial_rollout): unfinished responses continue in the next step
- curriculum (--curriculum): prompts that were too easy or too hard rest for some epochs
- --overlap: models compute outputs of complete groups while the engine decodes others
- --bad_rows skip: prompts whose media cannot be read any more are left out; see readable.py
- staleness (--max_staleness): the engine generates the next steps while this one is learned. The
  first round of each begins in Rounds.selected()

All ranks make the same decisions, from numbers that all of them have. It does not matter which
response ends first.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from heapq import heapify, heapreplace
from itertools import chain
from math import ceil, inf
from typing import Any

from lightrft.algorithms.rollout.rollout import FixedBatch, PreparedRequests
from lightrft.algorithms.schedulers.assignment import Assignment
from lightrft.algorithms.schedulers.curriculum import Curriculum
from lightrft.algorithms.schedulers.dynamic import DynamicSampling
from lightrft.algorithms.schedulers.open_round import OpenPlan, OpenRound
from lightrft.algorithms.schedulers.overlap import Overlap
from lightrft.algorithms.schedulers.partial import PartialGroup, PartialGroups
from lightrft.algorithms.schedulers.readable import ReadableMedia
from lightrft.algorithms.schedulers.tail_rounds import DeferredGroup, defer, next_tail_round
from lightrft.config.sections import RolloutSection
from lightrft.core.engine import derived_seed
from lightrft.core.groups import Group
from lightrft.core.metrics import Metrics
from lightrft.core.order import fair_owners


def needs_rounds(section: RolloutSection) -> bool:
    """Return True if a run has an option that FixedBatch does not know."""
    return (
        section.dynamic_sampling
        or section.over_sampling > 1
        or section.partial_rollout
        or section.rollout_schedule != "fifo"
        or bool(section.curriculum)
        or section.max_staleness > 0
        or section.overlap
    )


class Rounds(FixedBatch):
    """The scheduler that has all options; the first lines of this file list them."""

    def __init__(
        self,
        *args: Any,
        skips_unreadable: bool = False,
        overlap: Overlap | None = None,
        total_steps: float = inf,
        **kwargs,
    ):
        """Set up the scheduler; the other arguments are as for FixedBatch.

        `skips_unreadable`: leave out prompts whose media cannot be read any more, instead of ending
        the run. `overlap`: thread that computes model outputs for complete groups while others are
        generated. `total_steps`: last step, after which none is generated ahead (--max_staleness).
        """
        super().__init__(*args, **kwargs)
        self.overlap = overlap
        self.total_steps = total_steps
        self.partial = PartialGroups(self.data)
        self.media: ReadableMedia | None = None
        if skips_unreadable:
            self.media = ReadableMedia(self.prompts, self.sampler.exchange, self.data)

        section = self.section
        self.tail_rounds = section.rollout_schedule == "tail_rounds"
        self.curriculum: Curriculum | None = None
        if section.curriculum:
            self.curriculum = Curriculum(section.curriculum, section.curriculum_rest, self.history)

        self._ahead: deque[OpenRound] = deque()
        """First rounds of the next steps. Checkpoints do not contain the responses, so a resumed
        run begins these groups anew."""
        self._capacity = 1
        """How many responses the engines of a data replica decode at once, known from the first
        round on."""
        self._step = 0
        """The step that was generated last."""
        self._num_rounds = 0
        """How many rounds it has taken."""
        self._selection = self._new_selection()
        self._kept: list[Group] = []
        """This rank's complete groups of the step."""

    # -- a step

    def generate(self, step: int) -> Iterator[Group]:
        self._step = step
        self._num_rounds = 0
        self._kept = []
        selection = self._selection = self._new_selection()

        while selection.missing and self._num_rounds < self.section.dynamic_sampling_rounds:
            # With --max_staleness an earlier step has begun this step's first round.
            if self._ahead and not self._num_rounds:
                round = self._ahead.popleft()
            else:
                round = self._start(step, self._num_rounds, selection.missing, selection.acceptance)
            self._num_rounds += 1
            yield from round.generate()
            self._take_groups(round.groups(), round.plan)

    def _new_selection(self) -> DynamicSampling:
        return DynamicSampling(
            self.section.rollout_batch_size, self.section.dynamic_sampling_rounds
        )

    def _take_groups(self, groups: list[Group], plan: OpenPlan) -> None:
        """Take this rank's groups when a round has ended."""
        selection = self._selection
        complete = [group for group in groups if group.complete]
        if self.section.dynamic_sampling:
            self.rewards.finish([each for group in complete for each in group.responses])
            outcomes = self.scored(complete)
            usable = {each.number for each in outcomes if each.has_signal}
            selection.take(outcomes)
        else:
            shares = self.data.gather([group.number for group in complete])
            numbers = sorted(chain.from_iterable(shares))
            usable = set(numbers)
            selection.chosen.update(numbers[: selection.missing])

        # A settled group has an outcome that counts: chosen, or known to have no signal.
        settled = selection.chosen.union(selection.without_signal)
        self._kept += [group for group in groups if group.number in settled]
        if self.section.partial_rollout:
            self.partial.keep([group for group in groups if group.number not in settled])

        if self.tail_rounds:
            left = [each for each in plan.as_deferred if each[1] not in selection.chosen]
            self.deferred = defer(self.deferred, left, complete=usable)

    def selected(self, metrics: Metrics) -> list[Group]:
        metrics.max("rollout/groups_carried", len(self.partial.of_all))
        if self.section.dynamic_sampling:
            self._selection.report(metrics, self._num_rounds)
        if self.media is not None:
            metrics.max("rollout/prompts_left_out", len(self.media.left_out))
        if self.tail_rounds:
            metrics.max("rollout/groups_parked", len(self.deferred))

        # The rounds of later steps start here, with the engine awake and its newest weights.
        while len(self._ahead) < min(self.section.max_staleness, self.total_steps - self._step):
            later = self._step + 1 + len(self._ahead)
            self._ahead.append(self._start(later, 0, self.section.rollout_batch_size, 1.0))

        fill = self._selection.fill(self._kept, warns=self.data.rank == 0)
        numbers = self._selection.chosen | fill
        groups = [group for group in self._kept if group.number in numbers]
        return sorted(groups, key=lambda group: group.number)

    # -- choosing the prompts

    def _plan_round(self, missing: int, acceptance: float, capacity: int) -> OpenPlan:
        """Choose the groups that continue, begin anew, or are new, without drawing them yet."""
        section = self.section
        size = ceil(missing * section.over_sampling / acceptance)
        needed = missing if section.over_sampling > 1 else size
        continued = self.partial.of_all[:size]

        # Unfinished groups go first, then deferred ones; only the rest of the round is new.
        left_out = self.media.left_out if self.media else set()
        deferred = [each for each in self.deferred if each[2] not in left_out]
        ahead = size - len(continued)
        again = deferred[:ahead]
        num_new = ahead - len(again)
        if self.tail_rounds:
            needed = missing
            batch = missing - len(continued)
            again, num_new = next_tail_round(deferred, self._rows_left, batch=batch, ahead=ahead)

        rows, position = self._rows(num_new, left_out)
        new = list(enumerate(rows, self.number + 1))
        drawn = [(group.number, group.row) for group in continued]
        drawn += [(number, row) for _, number, row in again]
        drawn += new

        lengths = self.history.expected_lengths([row for _, row in drawn])
        responses = section.n_samples_per_prompt + self.greedy
        ranks = self._balanced(continued, lengths, responses)
        # Under longest_first only groups that continue have a rank; the others wait for room.
        shared = section.rollout_schedule == "longest_first"
        divided = shared and self.overlap is None and self.sampler.divides_groups
        first_owners = [
            rank if index < len(continued) or not shared else None
            for index, rank in enumerate(ranks)
        ]
        room = {"num_ranks": self.data.size, "at_once": capacity}
        assignment = Assignment(
            lengths, first_owners, responses, needed=needed, divided=divided, **room
        )

        return OpenPlan(
            drawn,
            ranks,
            position,
            self.number + len(rows),
            times_deferred=[*[0] * len(continued), *(each[0] for each in again), *[0] * len(new)],
            assignment=assignment,
            divided=divided,
            partial=self.partial.of_all[size:],
            deferred=sorted(set(deferred).difference(again)),
        )

    def _balanced(
        self, continued: list[PartialGroup], lengths: list[float], responses: int
    ) -> list[int]:
        """Return the rank of each group.

        Groups that continue stay where they are, and new ones go to the rank with the least work.
        """
        costs = [length * responses for length in lengths[len(continued) :]]
        if not continued:
            return fair_owners(self.data.size, costs) if costs else []

        loads = [0.0] * self.data.size
        for group, length in zip(continued, lengths, strict=False):
            loads[group.rank] += group.work(length)
        ranks = [(load, rank) for rank, load in enumerate(loads)]
        heapify(ranks)

        chosen = [group.rank for group in continued]
        for cost in costs:
            load, rank = ranks[0]
            chosen.append(rank)
            heapreplace(ranks, (load + cost, rank))
        return chosen

    @property
    def _rows_left(self) -> int:
        """Return how many prompts of the epoch have not begun.

        An epoch is over only when none of these groups is deferred either.
        """
        left = -self.position % self.order.num_rows
        return left or (0 if self.deferred else self.order.num_rows)

    def _rows(self, count: int, left_out: set[int]) -> tuple[list[int], int]:
        """Return the next prompts that are not left out and do not rest, and the position after."""
        rows: list[int] = []
        position = self.position
        while len(rows) < count:
            for row in self.order.rows(position, count - len(rows)):
                epoch = position // self.order.num_rows
                rests = self.curriculum is not None and self.curriculum.rests(row, epoch)
                if row not in left_out and not rests:
                    rows.append(row)
                position += 1
        return rows, position

    # -- generating

    def _seed(self, step: int, round: int = 0) -> int:
        # However often a tail round's group is repeated, it draws the same.
        return super()._seed(step, round) if not self.tail_rounds else derived_seed(self.seed, 0)

    def _start(self, step: int, round: int, missing: int, acceptance: float) -> OpenRound:
        """Draw the groups of a round, and begin this rank's first responses."""
        loop = self.sampler.open(self._seed(step, round))
        self._capacity = self.sampler.capacity(loop)
        prepared, self._prepared = self._prepared, None
        plan = prepared.plan if prepared else self._plan_round(missing, acceptance, self._capacity)

        # Planning goes on until all media can be read: what is left out changes the next plan.
        if self.media is not None:
            found = prepared.unreadable if prepared else self._unreadable(plan)
            while self.media.leave_out(found):
                plan = self._plan_round(missing, acceptance, self._capacity)
                prepared = None
                found = self._unreadable(plan)

        self.position = plan.position
        self.number = plan.number
        self.deferred = plan.deferred
        self.partial.of_all = plan.partial
        opened = OpenRound(
            loop,
            plan,
            prepared,
            make_group=self._group,
            sampler=self.sampler,
            replica=self.rewards.model_parallel,
            data=self.data,
            trace=self.trace,
            every=self.section.early_stop_every,
            overlap=self.overlap,
        )
        self.partial.forget({number for number, _ in plan.drawn})
        return opened

    def _group(self, number: int, row: int) -> Group:
        """Return a group of this rank, either continued or new."""
        return self.partial.find(number) or super()._group(number, row)

    def _unreadable(self, plan: OpenPlan) -> dict[int, str]:
        """Return row -> reason for the unreadable prompts of a round that this rank checks.

        Groups that have begun go on without a check.
        """
        if self.media is None:
            return {}
        begun = {group.row for group in self.partial.of_all}
        rows = [row for _, row in plan.drawn if row not in begun]
        local_rows = {row for _, row, _ in plan.share_of(self.data.rank)}.difference(begun)
        return self.media.problems(rows, local_rows)

    # -- preparing

    def preparing(self, step: int) -> AbstractContextManager[None]:
        """Prepare the first round of a step, unless it runs already while this one is learned."""
        return nullcontext() if self.section.max_staleness else super().preparing(step)

    def _plan(self) -> OpenPlan:
        return self._plan_round(self.section.rollout_batch_size, 1.0, self._capacity)

    def _prepared_round(self, plan: OpenPlan, seed: int) -> PreparedRequests:
        if found := self._unreadable(plan):
            return PreparedRequests(plan, {}, None, found)
        return super()._prepared_round(plan, seed)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same on all ranks except for the unfinished groups.

        Rank 0 has the unfinished groups of all ranks, and the others have none.
        """
        return super().state_dict() | self.partial.state_dict() | {"deferred": self._all_deferred}

    @property
    def _all_deferred(self) -> list[DeferredGroup]:
        """Return the groups that a resumed run begins anew."""
        begun = [each for round in self._ahead for each in round.plan.as_deferred]
        return sorted([*self.deferred, *begun])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state.

        Groups that exceed --generate_max_len are dropped; the flag may have become smaller.
        """
        self.partial.load_state_dict(state, self.prompts, longest=self.section.generate_max_len)
        super().load_state_dict(state | {"partial": []})

    def snapshot(self) -> Callable[[], None]:
        progress = self.position, self.number, self._all_deferred
        restore_history = self.history.snapshot()
        restore_partial = self.partial.snapshot(self.prompts)

        def rollback() -> None:
            self._ahead.clear()
            self._restore(*progress)
            restore_partial()
            restore_history()

        return rollback
