"""Collect the samples of a step: choose the prompts, distribute them over ranks, and select the groups to learn from.

By default there are `rollout_batch_size` prompts, and every response is generated to its end. These can be combined:

- dynamic sampling (DAPO, arXiv 2503.14476): groups of equal rewards are replaced by other prompts, round after round
- over-sampling: more prompts than needed, stopping as soon as enough groups are complete; with tail rounds (RollPacker,
  arXiv 2509.21009) the others begin anew in later steps, so that nothing is lost and every token is of the newest weights
- partial rollouts (Kimi k1.5, arXiv 2501.12599): unfinished responses continue in the next step, with their log-probs
- curriculum: prompts that were too easy or too hard are on cooldown for some passes over the data

All ranks make the same decisions, from numbers that all of them have. The order in which responses end does not matter.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from math import ceil
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from lightrft.config.errors import ConfigError
from lightrft.config.sections import RolloutSection
from lightrft.data.loader import Blend, Order, fair_owners
from lightrft.engine.requests import derived_seed
from lightrft.observe.metrics import Metrics
from lightrft.observe.trace import Untraced
from lightrft.parallel.collectives import Axis
from lightrft.rewards.runner import RewardRunner
from lightrft.rollout.divided import move_responses
from lightrft.rollout.groups import GROWING, Carried, Group, GroupOutcome, History
from lightrft.rollout.overlap import CHUNKS, Overlap
from lightrft.rollout.sampler import Growth, Sampler
from lightrft.rollout.schedule import Parked, Round, next_tail_round
from lightrft.types import Prompt, Sample


@dataclass(slots=True)
class Begun:
    """A round of which this rank's first responses are being generated."""

    growth: Growth
    round: Round
    drawn: list[Parked]
    """Groups of all ranks."""
    homes: dict[int, int] | None
    """Number of a group -> rank to which its responses are moved at the end; None: groups stay where they are generated."""
    local_groups: dict[int, Group] = field(default_factory=dict)
    """Place in `drawn` -> group of which this rank generates responses."""
    local_chunks: list[int] = field(default_factory=list)
    """Indices of the chunks that this rank generates."""
    num_taken: int = 0
    """Number of chunks of all ranks that have begun."""


LEAST_ACCEPTANCE = 0.25
"""Lowest acceptance that is assumed: a round draws at most four prompts for one that is missing."""


class Collector:
    """Collector of the samples of each step. A checkpoint has its position in the data, its carried groups, and its history."""

    def __init__(
        self, sampler: Sampler, rewards: RewardRunner, prompts: Sequence[Prompt], *, section: RolloutSection, data: Axis,
        seed: int, greedy: bool = False, order: Order | Blend | None = None,
    ):  # fmt: skip
        """Set up the collector. With `greedy` each group also has the greedy response to its prompt.

        `order` is the order of the prompts; the seed determines it when None.
        """
        self.sampler, self.rewards, self.prompts, self.section = sampler, rewards, prompts, section
        self.data, self.seed, self.greedy = data, seed, greedy
        self.trace = Untraced()
        """Trace that measures how long this rank waits for the generation of others."""
        self.overlap: Overlap | None = None
        """What computes the models' outputs for complete groups while others are generated."""
        self.order, self.history = order or Order(len(prompts), seed), History(len(prompts))
        self.place = 0
        """Number of prompts drawn or passed over, in the order of the data."""
        self.number = 0
        """Number of groups begun."""
        self.carried: list[Group] = []
        """Groups begun on this rank, where they continue, and not learned from yet."""
        self.all_carried: list[Carried] = []
        """Summaries of the carried groups of all ranks, the same on every rank."""
        self._ahead: deque[Begun] = deque()
        """First rounds of the next steps, which are generated while this one is learned. A checkpoint does not contain their
        responses: a resumed run begins their groups anew."""
        self.parked: list[Parked] = []
        """Groups that wait to begin anew: of tail rounds, and in a resumed run; the same on every rank."""

    def __call__(self, step: int, metrics: Metrics, *, ahead: int = 0) -> list[Group]:
        """Return this rank's complete groups of a step; all ranks together have `rollout_batch_size`. The engine must be awake.

        The generation of the next `ahead` steps begins, if it has not yet, with the weights that the engine has now.

        Raises ConfigError if no group of any round has a signal.
        """
        section, missing, rounds = self.section, self.section.rollout_batch_size, 0
        held: list[Group] = []
        chosen: set[int] = set()
        idle: list[int] = []
        while missing and rounds < section.dynamic_sampling_rounds:
            tried = len(chosen) + len(idle)
            began_ahead = self._ahead and not rounds
            acceptance = len(chosen) / tried if tried else 1.0
            begun = self._ahead.popleft() if began_ahead else self._begin(step, rounds, missing, acceptance=acceptance)
            local_groups, drawn = self._generate(begun), begun.drawn
            with_signal, without_signal = self._split_by_signal([group for group in local_groups if group.complete])
            chosen |= set(with_signal[:missing])
            idle += without_signal
            settled = chosen.union(idle)
            held += [group for group in local_groups if group.number in settled]
            self._carry([group for group in local_groups if group.number not in settled])
            if self._in_tail_rounds:
                self._park([each for each in drawn if each[1] not in chosen], complete=set(with_signal))
            missing, rounds = section.rollout_batch_size - len(chosen), rounds + 1
        if section.dynamic_sampling:
            metrics.max("rollout/sampling_rounds", rounds)
            metrics.max("rollout/groups_given_up", len(idle))
        metrics.max("rollout/groups_carried", len(self.all_carried))
        if self._in_tail_rounds:
            metrics.max("rollout/groups_parked", len(self.parked))
        while len(self._ahead) < ahead:
            later = step + 1 + len(self._ahead)
            self._ahead.append(self._begin(later, 0, section.rollout_batch_size, acceptance=1.0))
        instead = set(self._substitutes(idle, missing))
        for group in held:
            if group.number in instead:
                group.mask()
        return sorted((group for group in held if group.number in chosen | instead), key=lambda group: group.number)

    def rewarded(self, groups: list[Group], metrics: Metrics) -> list[Sample]:
        """Return the samples of groups, with their rewards, and record the outcomes of all ranks' groups in the history."""
        self._settle(groups)
        self.rewards.count_failures("rollout/reward_failures", metrics)
        return [sample for group in groups for sample in group.samples]

    # -- choosing the prompts

    @property
    def _in_tail_rounds(self) -> bool:
        return self.section.rollout_schedule == "tail_rounds"

    def _next_round(self, growth: Growth, missing: int, *, acceptance: float) -> Begun:
        """Return a round with its groups, which as yet never waited unless they were parked: carried, parked and new ones."""
        wanted = ceil(missing * self.section.over_sampling / max(acceptance, LEAST_ACCEPTANCE))
        needed = missing if self.section.over_sampling > 1 else wanted
        carried, self.all_carried = self.all_carried[:wanted], self.all_carried[wanted:]
        again = self.parked[: wanted - len(carried)]
        if self._in_tail_rounds:
            sizes = {"batch": missing - len(carried), "ahead": wanted - len(carried)}
            again, num_new = next_tail_round(self.parked, self._rows_left, **sizes)
            wanted, needed = len(carried) + len(again) + num_new, missing
        self.parked = sorted({*self.parked}.difference(again))
        rows = self._rows(wanted - len(carried) - len(again))
        drawn = [*((0, group.number, group.row) for group in carried), *again]
        drawn += [(0, number, row) for number, row in enumerate(rows, self.number + 1)]
        self.number += len(rows)
        lengths = self.history.expected_lengths([row for *_, row in drawn])
        work = [group.work(length) for group, length in zip(carried, lengths, strict=False)]
        responses = self.section.n_samples_per_prompt + self.greedy
        costs = [length * responses for length in lengths[len(carried) :]]
        homes = [group.rank for group in carried]
        homes += self._balanced(homes, work, costs)
        shared = self.section.rollout_schedule == "longest_first"
        divided = shared and self.overlap is None and self.sampler.episodes is None
        ranks = homes[: len(carried)] + [None] * len(costs) if shared else homes
        round = Round(lengths, ranks, responses, num_ranks=self.data.size, needed=needed, at_once=growth.at_once, divided=divided)
        numbers = [number for _, number, _ in drawn]
        return Begun(growth, round, drawn, dict(zip(numbers, homes, strict=True)) if divided else None)

    def _balanced(self, owners: list[int], work: list[float], costs: list[float]) -> list[int]:
        """Return the rank of each new group with these costs, beside carried groups with their ranks and work."""
        if not work:
            return fair_owners(self.data.size, costs) if costs else []
        loads = [0.0] * self.data.size
        for rank, tokens in zip(owners, work, strict=True):
            loads[rank] += tokens
        ranks = [(load, rank) for rank, load in enumerate(loads)]
        heapify(ranks)
        chosen = []
        for cost in costs:
            load, rank = ranks[0]
            chosen.append(rank)
            heapreplace(ranks, (load + cost, rank))
        return chosen

    @property
    def _rows_left(self) -> int:
        """Return the number of prompts that have not begun of a pass over the data, which is over when none is parked either."""
        return -self.place % self.order.num_rows or (0 if self.parked else self.order.num_rows)

    def _rows(self, wanted: int) -> list[int]:
        """Return the next prompts of the data, without those on cooldown."""
        rows: list[int] = []
        while len(rows) < wanted:
            for row in self.order.rows(self.place, wanted - len(rows)):
                if not self._on_cooldown(row):
                    rows.append(row)
                self.place += 1
        return rows

    def _on_cooldown(self, row: int) -> bool:
        least, most = self.section.curriculum or (0.0, 1.0)
        last = int(self.history.turns[row])
        return not (last < 0 or least <= self.history.solved[row] <= most or self._turn - last >= self.section.curriculum_rest)

    @property
    def _turn(self) -> int:
        return self.place // self.order.num_rows

    # -- generating

    def _begin(self, step: int, number: int, missing: int, *, acceptance: float) -> Begun:
        """Choose the groups of round `number` of a step, and begin this rank's first ones."""
        parts = () if self._in_tail_rounds else (step, number)
        growth = self.sampler.open(derived_seed(self.seed, *parts, 0))
        begun = self._next_round(growth, missing, acceptance=acceptance)
        self._take(begun)
        return begun

    def _take(self, begun: Begun) -> None:
        """Begin the responses that have been assigned to this rank since the last call."""
        round, parts = begun.round, []
        for index in round.begun[begun.num_taken :]:
            if round.owners[index] == self.data.rank:
                place, places = round.chunks[index].place, round.chunks[index].responses
                if place not in begun.local_groups:
                    begun.local_groups[place] = group = self._taken(*begun.drawn[place][1:])
                    if group.complete:
                        self.rewards.begin(group.responses)
                parts.append((begun.local_groups[place], places))
                begun.local_chunks.append(index)
        begun.num_taken = len(round.begun)
        begun.growth.add(parts)

    def _generate(self, begun: Begun) -> list[Group]:
        """Generate the groups of a round; return this rank's, of which some are unfinished if the round ended before."""
        growth, round, drawn = begun.growth, begun.round, begun.drawn
        computed: set[int] = set()
        while True:
            exchanges = round.open or self.overlap is not None
            counts = self._begin_exchange(begun) if exchanges else None
            for group in growth.steps(self.section.early_stop_every if counts else None):
                self._begin_rewards(begun, group)
            if counts is None:
                break
            with self.trace.phase("wait", idle=not growth.running()):
                round.decide(*counts().tolist())
            if round.over:
                growth.abort()
                break
            if self.overlap is not None and len(round.complete - computed) * CHUNKS >= len(drawn):
                places = sorted(round.complete - computed)
                groups = [begun.local_groups[place] for place in places if place in begun.local_groups]
                self.overlap.begin([sample for group in groups for sample in group.samples])
                computed.update(places)
            self._take(begun)
        if self.overlap is not None:
            with self.trace.phase("overlap"):
                self.overlap.finish()
        with self.trace.phase("wait", idle=True):
            self.data.sum(torch.zeros(()))
        for group in growth.finish():
            self._begin_rewards(begun, group)
        return self._moved_home(begun) if begun.homes is not None else list(begun.local_groups.values())

    def _begin_rewards(self, begun: Begun, group: Group) -> None:
        """Begin the reward call of a group that is complete here, unless this is not its home."""
        if begun.homes is None or begun.homes[group.number] == self.data.rank:
            self.rewards.begin(group.responses)

    def _moved_home(self, begun: Begun) -> list[Group]:
        """Move the responses of divided groups to their homes; return the groups of this rank."""
        generated = {group.number: group for group in begun.local_groups.values()}
        groups = {number: group for number, group in generated.items() if begun.homes[number] == self.data.rank}
        incomplete = {number for number, group in groups.items() if not group.complete}
        sent = {}
        for chunk in (begun.round.chunks[index] for index in begun.local_chunks):
            group = begun.local_groups[chunk.place]
            if group.number not in groups:
                sent |= {(group.number, place): group.responses[place] for place in chunk.responses}
        rows = {number: row for _, number, row in begun.drawn}
        for (number, place), completion in move_responses(sent, begun.homes, self.data, self.rewards.model_parallel).items():
            if number not in groups:
                groups[number] = self._taken(number, rows[number])
                incomplete.add(number)
            self.sampler.extend(groups[number].responses[place], completion)
        for number in sorted(incomplete):
            if groups[number].complete:
                self.rewards.begin(groups[number].responses)
        return [groups[number] for number in sorted(groups)]

    def _taken(self, number: int, row: int) -> Group:
        """Return a group of this rank: one that it carries, which is not carried any longer, or a new one."""
        carried = next((group for group in self.carried if group.number == number), None)
        if carried is None:
            return Group.begin(number, row, self.prompts[row], count=self.section.n_samples_per_prompt, greedy=self.greedy)
        self.carried = [group for group in self.carried if group is not carried]
        return carried

    def _begin_exchange(self, begun: Begun) -> Callable[[], Tensor]:
        """Begin to sum, for each chunk, its responses that run and the lengths of those that have ended: [2, chunks] int32.

        Return a function that waits for the sums.
        """
        begun.round.begin_exchange()
        running, counts = begun.growth.running(), torch.zeros(2, len(begun.round.chunks), dtype=torch.int32)
        for index in begun.local_chunks:
            chunk = begun.round.chunks[index]
            group = begun.local_groups[chunk.place]
            ended = [len(group.responses[place].token_ids) for place in chunk.responses
                     if group.responses[place].finish_reason != GROWING]  # fmt: skip
            counts[0, index] = sum((group.number, place) in running for place in chunk.responses)
            counts[1, index] = sum(ended)
        return self.sampler.exchange.begin_sum(counts)

    # -- selecting the groups

    def _split_by_signal(self, complete: list[Group]) -> tuple[list[int], list[int]]:
        """Return the numbers of all ranks' complete groups with a signal, and of those without, ascending."""
        if not self.section.dynamic_sampling:
            return sorted(_flattened(self.data.gather([group.number for group in complete]))), []
        outcomes = self._settle(complete)
        with_signal = [outcome.number for outcome in outcomes if outcome.has_signal]
        return with_signal, [outcome.number for outcome in outcomes if not outcome.has_signal]

    def _settle(self, groups: list[Group]) -> list[GroupOutcome]:
        """Wait for the rewards of this rank's groups, and record the outcomes of all ranks' groups."""
        self.rewards.finish([sample for group in groups for sample in group.responses])
        for group in groups:
            group.compare_with_greedy()
        outcomes = _flattened(self.data.gather([GroupOutcome.of(group) for group in groups]))
        outcomes.sort(key=lambda outcome: outcome.number)
        self.history.record(outcomes, self._turn)
        return outcomes

    def _carry(self, left: list[Group]) -> None:
        if self.section.partial_rollout:
            self.carried = sorted([*self.carried, *left], key=lambda group: group.number)
            others = _flattened(self.data.gather([Carried.of(group, self.data.rank) for group in left]))
            self.all_carried = sorted([*self.all_carried, *others], key=lambda group: group.number)

    def _park(self, left: list[Parked], *, complete: set[int]) -> None:
        """Let groups of a tail round wait that are not learned from; those that were not complete wait for a longer round."""
        self.parked = sorted([*self.parked, *((times + (number not in complete), number, row) for times, number, row in left)])

    def _substitutes(self, idle: list[int], missing: int) -> list[int]:
        """Return groups without signal, masked in the loss, that fill a step for which no round found enough."""
        if missing == self.section.rollout_batch_size:
            raise ConfigError(
                f"--dynamic_sampling: {len(idle)} prompts in {self.section.dynamic_sampling_rounds} rounds, and for each of them "
                "all responses got the same reward: there is no training signal. Are the data far too easy or too hard, or is "
                "the reward constant? `lightrft evaluate` shows responses; --dynamic_sampling_rounds allows more rounds"
            )
        if missing and self.data.rank == 0:
            size, rounds = self.section.rollout_batch_size, self.section.dynamic_sampling_rounds
            logger.warning("dynamic sampling: {} of {} groups have no signal after {} rounds", missing, size, rounds)
        return sorted(idle)[:missing]

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same on all ranks but for the carried groups: rank 0 has those of all ranks, the others none."""
        ranks = range(self.data.size)
        own = [(group.number, self.data.rank, group.state_dict()) for group in self.carried]
        everyone = _flattened(self.data.exchange_objects([own if rank == 0 else [] for rank in ranks]))
        everyone.sort(key=lambda each: each[0])
        carried, owners = [state for _, _, state in everyone], [rank for _, rank, _ in everyone]
        continued = {"carried": carried, "ranks": owners, "num_ranks": self.data.size}
        return {**self._position(), "history": self.history.state_dict(), **continued}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Groups longer than a --generate_max_len that has become shorter are dropped.

        Groups continue on the rank that began them, or round robin over all ranks if the number of ranks has changed or an older
        version wrote the state.
        """
        groups = [Group.restored(group, self.prompts) for group in state["carried"]]
        owners = state["ranks"] if state.get("num_ranks") == self.data.size else [n % self.data.size for n in range(len(groups))]
        fitting = [(group, rank) for group, rank in zip(groups, owners, strict=True) if group.fits(self.section.generate_max_len)]
        self.all_carried = [Carried.of(group, rank) for group, rank in fitting]
        self._restore(state, [group for group, rank in fitting if rank == self.data.rank])
        self.history.load_state_dict(state["history"])

    def begin(self) -> Callable[[], None]:
        """Return a function that undoes a step that begins now. It copies the tokens of this rank's groups only."""
        position, carried = self._position(), deepcopy([group.state_dict() for group in self.carried])
        all_carried, take_history_back = self.all_carried, self.history.begin()

        def take_back() -> None:
            self._ahead.clear()
            self.all_carried = all_carried
            self._restore(position, [Group.restored(group, self.prompts) for group in carried])
            take_history_back()

        return take_back

    def _position(self) -> dict[str, Any]:
        """Return the position in the data and the groups that begin anew."""
        parked = sorted([*self.parked, *(each for begun in self._ahead for each in begun.drawn)])
        return {"place": self.place, "number": self.number, "parked": parked}

    def _restore(self, position: dict[str, Any], carried: list[Group]) -> None:
        self.place, self.number, self.carried = position["place"], position["number"], carried
        self.parked = [(times, number, row) for times, number, row in position.get("parked", ())]


def _flattened(parts: Iterable[list]) -> list:
    return [each for part in parts for each in part]
