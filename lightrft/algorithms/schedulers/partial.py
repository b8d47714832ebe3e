"""Continue unfinished responses in the next step, with their log-probs (--partial_rollout).

Kimi k1.5, arXiv 2501.12599.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch

from lightrft.core.groups import Group
from lightrft.core.samples import Prompt
from lightrft.models.parallel.collectives import Axis


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """Facts about a group that continues in a later step, known to every rank."""

    number: int
    row: int
    rank: int
    """Data rank that began the group and continues it."""
    lengths: tuple[int, ...]
    """Tokens so far of each unfinished response."""

    @classmethod
    def of(cls, group: Group, rank: int) -> Self:
        unfinished = [each for each in group.responses if each.finish_reason is None]
        lengths = tuple(len(sample.token_ids) for sample in unfinished)
        return cls(group.number, group.row, rank, lengths)

    def work(self, length: float) -> float:
        """Return how many tokens are still expected if responses have `length` tokens.

        Each unfinished response counts as one token at least.
        """
        return sum(max(length - grown, 1.0) for grown in self.lengths) or 1.0


class PartialGroups:
    """Groups that have begun but are not learned from yet."""

    def __init__(self, data: Axis):
        self.data = data
        self.local: list[Group] = []
        """Groups that continue on this rank."""
        self.of_all: list[PartialGroup] = []
        """Groups of all ranks, the same on every rank."""

    def keep(self, left: list[Group]) -> None:
        """Keep this rank's groups for the next step. All ranks call it."""
        shares = self.data.gather([PartialGroup.of(group, self.data.rank) for group in left])
        self.local = sorted([*self.local, *left], key=lambda group: group.number)
        self.of_all = sorted(
            [*self.of_all, *chain.from_iterable(shares)], key=lambda group: group.number
        )

    def find(self, number: int) -> Group | None:
        """Return a group that waits on this rank, or None."""
        return next((group for group in self.local if group.number == number), None)

    def forget(self, numbers: set[int]) -> None:
        """Forget groups of this rank, because they continue now."""
        self.local = [group for group in self.local if group.number not in numbers]

    def snapshot(self, prompts: Sequence[Prompt]) -> Callable[[], None]:
        """Return a function that restores the groups. It holds copies of this rank's tokens."""
        states = deepcopy([state_of(group) for group in self.local])
        of_all = self.of_all

        def rollback() -> None:
            self.local = [group_of(state, prompts) for state in states]
            self.of_all = of_all

        return rollback

    def state_dict(self) -> dict[str, Any]:
        """Return the groups of all ranks on rank 0, and none elsewhere."""
        ranks = range(self.data.size)
        local = [(group.number, self.data.rank, state_of(group)) for group in self.local]
        shares = self.data.exchange_objects([local if rank == 0 else [] for rank in ranks])
        states = sorted(chain.from_iterable(shares), key=lambda each: each[0])
        return {
            "partial": [state for _, _, state in states],
            "ranks": [rank for _, rank, _ in states],
            "num_ranks": self.data.size,
        }

    def load_state_dict(
        self, state: dict[str, Any], prompts: Sequence[Prompt], *, longest: int
    ) -> None:
        """Restore the groups, except those with responses longer than `longest`.

        Each group continues on the rank that began it. If the number of ranks has changed, groups
        are dealt round robin.
        """
        groups = [group_of(group, prompts) for group in state["partial"]]
        owners = state["ranks"]
        if state["num_ranks"] != self.data.size:
            owners = [index % self.data.size for index in range(len(groups))]

        owned = zip(groups, owners, strict=True)
        fitting = [(group, rank) for group, rank in owned if fits(group, longest)]
        self.of_all = [PartialGroup.of(group, rank) for group, rank in fitting]
        self.local = [group for group, rank in fitting if rank == self.data.rank]


def fits(group: Group, longest: int) -> bool:
    """Return True if every response ends within `longest` tokens or still has room to grow."""
    return all(
        len(sample.token_ids) + (sample.finish_reason is None) <= longest
        for sample in group.responses
    )


def state_of(group: Group) -> dict[str, Any]:
    """Return the state of a group in plain types, without the prompt.

    Rewards are not part of it, because only complete groups get them.
    """
    responses = [
        (s.token_ids, s.logprobs, s.text, s.finish_reason, s.weight_versions)
        for s in group.responses
    ]
    return {
        "number": group.number,
        "row": group.row,
        "responses": responses,
        "greedy": bool(group.others),
        # Checkpoints hold tensors and plain types.
        "experts": [
            None if s.experts is None else torch.from_numpy(s.experts) for s in group.responses
        ],
    }


def group_of(state: dict[str, Any], prompts: Sequence[Prompt]) -> Group:
    """Return the group with this state."""
    others = int(state["greedy"])
    count = len(state["responses"]) - others
    row = state["row"]
    group = Group.begin(state["number"], row, prompts[row], count, others=others)

    columns = zip(group.responses, state["responses"], state["experts"], strict=True)
    for sample, values, experts in columns:
        token_ids, logprobs, sample.text, finish_reason, versions = values
        sample.finish_reason = finish_reason
        # The lists grow in place, and the saved state must stay as it is.
        sample.token_ids = list(token_ids)
        sample.logprobs = list(logprobs)
        sample.weight_versions = list(versions)
        sample.experts = None if experts is None else experts.numpy()

    return group
