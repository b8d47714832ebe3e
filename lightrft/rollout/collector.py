"""Collect the samples of a step: choose the prompts, distribute them over ranks, and select the groups to learn from.

By default there are `rollout_batch_size` prompts, and every response is generated to its end. These can be combined:

- dynamic sampling (DAPO, arXiv 2503.14476): groups of equal rewards are replaced by other prompts, round after round
- over-sampling: more prompts than needed, stopping as soon as enough groups are complete
- partial rollouts (Kimi k1.5, arXiv 2501.12599): unfinished responses continue in the next step, with their log-probs
- curriculum: prompts that were too easy or too hard are on cooldown for some passes over the data

All ranks make the same decisions, from numbers that all of them have. The order in which responses end does not matter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import count
from math import ceil
from typing import Any

import torch
from loguru import logger

from lightrft.config.errors import ConfigError
from lightrft.config.sections import RolloutSection
from lightrft.data.loader import Blend, Order, fair_share
from lightrft.engine.requests import derived_seed
from lightrft.observe.metrics import Metrics
from lightrft.observe.trace import Untraced
from lightrft.parallel.collectives import Axis
from lightrft.rewards.runner import RewardRunner
from lightrft.rollout.groups import Carried, Group, GroupOutcome, History
from lightrft.rollout.sampler import Sampler
from lightrft.types import Prompt, Sample


@dataclass(frozen=True, slots=True)
class Begun:
    """Groups whose generation has begun, for the first round of a step."""

    groups: list[Group]
    finished: Iterator[Group]
    numbers: dict[str, Any]
    """Position in the data before them: a checkpoint does not contain them, so that a resumed run begins them again."""


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
        self.order, self.history = order or Order(len(prompts), seed), History(len(prompts))
        self.place = 0
        """Number of prompts drawn or passed over, in the order of the data."""
        self.number = 0
        """Number of groups begun."""
        self.carried: list[Group] = []
        """Groups begun on this rank, where they continue, and not learned from yet."""
        self.all_carried: list[Carried] = []
        """Summaries of the carried groups of all ranks, the same on every rank."""
        self._ahead: Begun | None = None
        """Groups of the next step, which are generated while this one is learned."""

    def __call__(self, step: int, metrics: Metrics, *, ahead: bool = False) -> list[Group]:
        """Return this rank's complete groups of a step; all ranks together have `rollout_batch_size`. The engine must be awake.

        With `ahead` the generation of the next step begins, with the weights that the engine has now.

        Raises ConfigError if no group of any round has a signal.
        """
        section, missing, rounds = self.section, self.section.rollout_batch_size, 0
        held: list[Group] = []
        chosen: set[int] = set()
        idle: list[int] = []
        while missing and rounds < section.dynamic_sampling_rounds:
            tried = len(chosen) + len(idle)
            begun, self._ahead = self._ahead, None
            begun = begun or self._begin(step, rounds, missing, acceptance=len(chosen) / tried if tried else 1.0)
            local_groups = begun.groups
            self._generate(begun, missing, seed=(self.seed, step, rounds))
            with_signal, without_signal = self._split_by_signal([group for group in local_groups if group.complete])
            chosen |= set(with_signal[:missing])
            idle += without_signal
            settled = chosen.union(idle)
            held += [group for group in local_groups if group.number in settled]
            self._carry([group for group in local_groups if group.number not in settled])
            missing, rounds = section.rollout_batch_size - len(chosen), rounds + 1
        if section.dynamic_sampling:
            metrics.max("rollout/sampling_rounds", rounds)
            metrics.max("rollout/groups_given_up", len(idle))
        metrics.max("rollout/groups_carried", len(self.all_carried))
        if ahead:
            self._ahead = self._begin(step + 1, 0, section.rollout_batch_size, acceptance=1.0)
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

    def _next_groups(self, missing: int, *, acceptance: float) -> list[Group]:
        """Return this rank's groups of a round: carried groups, then new ones; the work is balanced over ranks."""
        wanted = ceil(missing * self.section.over_sampling / max(acceptance, LEAST_ACCEPTANCE))
        drawn, self.all_carried = self.all_carried[:wanted], self.all_carried[wanted:]
        rows = self._rows(wanted - len(drawn))
        lengths = self.history.expected_lengths([group.row for group in drawn] + rows)
        loads = [0.0] * self.data.size
        for group, length in zip(drawn, lengths, strict=False):
            loads[group.rank] += group.work(length)
        responses = self.section.n_samples_per_prompt + self.greedy
        costs = [length * responses for length in lengths[len(drawn) :]]
        numbers = {group.number for group in drawn}
        local_groups = [group for group in self.carried if group.number in numbers]
        self.carried = [group for group in self.carried if group.number not in numbers]
        local_groups += [self._begun(self.number + 1 + place, rows[place]) for place in self._share(loads, costs)]
        self.number += len(rows)
        return local_groups

    def _share(self, loads: list[float], costs: list[float]) -> Sequence[int]:
        """Return the positions of this rank's share of new groups with these costs, given each rank's load of carried groups."""
        if not any(loads):
            return fair_share(self.data.rank, self.data.size, costs) if costs else ()
        ranks = [(load, rank) for rank, load in enumerate(loads)]
        heapify(ranks)
        owners = []
        for cost in costs:
            load, rank = ranks[0]
            owners.append(rank)
            heapreplace(ranks, (load + cost, rank))
        return [place for place, owner in enumerate(owners) if owner == self.data.rank]

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

    def _begun(self, number: int, row: int) -> Group:
        return Group.begin(number, row, self.prompts[row], count=self.section.n_samples_per_prompt, greedy=self.greedy)

    # -- generating

    def _begin(self, step: int, round: int, missing: int, *, acceptance: float) -> Begun:
        """Choose this rank's groups of a round, and begin to generate their responses."""
        before = self._numbers()
        groups = self._next_groups(missing, acceptance=acceptance)
        return Begun(groups, self._grow(groups, (self.seed, step, round, 0)), before)

    def _grow(self, groups: list[Group], seed: tuple[int, ...]) -> Iterator[Group]:
        limit = self.section.early_stop_every if self.section.over_sampling > 1 else None
        return self.sampler.grow(groups, seed=derived_seed(*seed), limit=limit)

    def _generate(self, begun: Begun, needed: int, *, seed: tuple[int, ...]) -> None:
        """Extend this rank's groups until `needed` of all ranks' are complete; to the end without over-sampling."""
        local_groups = begun.groups
        for group in local_groups:
            if group.complete:
                self.rewards.begin(group.responses)
        for turn in count():
            for group in begun.finished if turn == 0 else self._grow(local_groups, (*seed, turn)):
                self.rewards.begin(group.responses)
            complete = sum(group.complete for group in local_groups)
            with self.trace.phase("wait", idle=True):
                complete, growing = self.data.sum(torch.tensor([complete, len(local_groups) - complete])).tolist()
            if complete >= needed or not growing:
                return

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

    def _substitutes(self, idle: list[int], missing: int) -> list[int]:
        """Return groups without signal, masked in the loss, that fill a step for which no round found enough."""
        if missing == self.section.rollout_batch_size:
            raise ConfigError(
                f"--dynamic_sampling: {len(idle)} prompts in {self.section.dynamic_sampling_rounds} rounds, and for each of them "
                "all responses got the same reward: there is no training signal. Are the data far too easy or too hard, or is "
                "the reward constant? `lightrft evaluate` shows responses; --dynamic_sampling_rounds allows more rounds"
            )
        if missing and self.data.rank == 0:
            logger.warning("dynamic sampling: {} of {} groups have no signal after {} rounds", missing,
                           self.section.rollout_batch_size, self.section.dynamic_sampling_rounds)
        return sorted(idle)[:missing]

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same on all ranks but for the carried groups: rank 0 has those of all ranks, the others none."""
        ranks = range(self.data.size)
        own = [(group.number, self.data.rank, group.state_dict()) for group in self.carried]
        everyone = _flattened(self.data.exchange_objects([own if rank == 0 else [] for rank in ranks]))
        everyone.sort(key=lambda each: each[0])
        carried, owners = [state for _, _, state in everyone], [rank for _, rank, _ in everyone]
        return {**self._numbers(), "carried": carried, "ranks": owners, "num_ranks": self.data.size}

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

    def begin(self) -> Callable[[], None]:
        """Return a function that undoes a step that begins now. It copies the tokens of this rank's groups only."""
        numbers, carried = deepcopy((self._numbers(), [group.state_dict() for group in self.carried]))
        all_carried = self.all_carried

        def take_back() -> None:
            self._ahead = None
            self.all_carried = all_carried
            self._restore(numbers, [Group.restored(group, self.prompts) for group in carried])

        return take_back

    def _numbers(self) -> dict[str, Any]:
        """Return the position in the data, without groups that have begun ahead, and the history."""
        if self._ahead is not None:
            return self._ahead.numbers | {"history": self.history.state_dict()}
        return {"place": self.place, "number": self.number, "history": self.history.state_dict()}

    def _restore(self, numbers: dict[str, Any], carried: list[Group]) -> None:
        self.place, self.number, self.carried = numbers["place"], numbers["number"], carried
        self.history.load_state_dict(numbers["history"])


def _flattened(parts: Iterable[list]) -> list:
    return [each for part in parts for each in part]
