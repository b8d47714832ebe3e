"""Planner that assigns sequences to ranks and micro-batches.

A plan is a pure function of the lengths and prompts of all sequences, so every rank computes the
same plan without communication. Batches are always flat, without padding: the three batching modes
decide only which sequences share a micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np

from lightrft.batching.bin_packing import Limits, pack, work
from lightrft.batching.large_plans import pack_large_step
from lightrft.batching.prefix_sharing import MIN_SAVING

Batching = Literal["packed", "dynamic", "plain"]
Prompts = Sequence[tuple[int, int, int]] | np.ndarray
"""Prompt of each row as (identifier, number of tokens, cost of its media in tokens): rows with
equal entries begin with the same tokens and media."""

LARGE_STEP = 16384
"""Number of rows above which an optimizer step is planned with vectorized operations."""

PARTS = (1, 2, 4)
"""Numbers of parts into which the rows of a prompt are split: fewer share more, more can be
balanced better."""
MANY_PROMPTS = 512
"""Number of prompts above which balance is good enough without splitting the rows of a prompt."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan in which minibatches[k][rank][m] are the rows of micro-batch m that `rank` computes for
    optimizer step k.

    Every rank has the same number of micro-batches in an optimizer step. A micro-batch can be empty
    if there are fewer rows than ranks; it then takes part in the collectives with weight zero.
    """

    minibatches: list[list[list[list[int]]]]

    def rows(self, rank: int) -> list[int]:
        """Return all rows of a rank, in the order in which it computes them."""
        return [row for minibatch in self.minibatches for rows in minibatch[rank] for row in rows]

    def local(self, rank: int) -> list[list[list[int]]]:
        """Return [k][m]: the rows of the rank's micro-batches as positions in `rows(rank)`."""
        position = {row: place for place, row in enumerate(self.rows(rank))}
        return [
            [[position[row] for row in rows] for rows in minibatch[rank]]
            for minibatch in self.minibatches
        ]


def plan(
    lengths: list[int],
    *,
    num_ranks: int,
    minibatch_size: int,
    max_tokens: int,
    max_sequences: int | None = None,
    batching: Batching = "packed",
    prompts: Prompts | None = None,
    units: Sequence[int] | np.ndarray | None = None,
) -> Plan:
    """Split rows 0..N-1 into consecutive optimizer steps of `minibatch_size`, each divided over
    ranks and micro-batches.

    `units` are numbers that ascend from 0, one for each row; those of a unit are counted once, and
    learned in one step.

    packed: any sequences up to max_tokens, so that all ranks finish together; rows with equal
    `prompts` share a micro-batch, which computes their prompt once, if that makes the plan shorter.
    dynamic: sequences of similar length, whose number times the longest length stays within
    max_tokens. plain: max_sequences rows in their given order, fewer if they exceed max_tokens.
    Raise ValueError for a sequence that is empty or longer than max_tokens.
    """
    _check(lengths, max_tokens)
    limits = Limits(max_tokens, max_sequences or max(len(lengths), 1))
    if prompts is None:
        prompts = np.column_stack([np.arange(len(lengths)), *[np.zeros_like(lengths)] * 2])
    prompts = np.asarray(prompts)
    split = {
        "packed": partial(_shortest, prompts),
        "dynamic": _dynamic,
        "plain": _consecutive_rows,
    }[batching]

    starts = (
        range(0, len(lengths), minibatch_size)
        if units is None
        else _starts(np.asarray(units), minibatch_size)
    )
    steps = [range(start, stop) for start, stop in pairwise([*starts, len(lengths)])]
    return Plan([split(lengths, rows, num_ranks, limits) for rows in steps])


def _starts(units: np.ndarray, size: int) -> list[int]:
    """Return the first row of each optimizer step of `size` units."""
    steps = units // size
    return [0, *(1 + np.flatnonzero(steps[1:] != steps[:-1]))] if len(units) else []


def _check(lengths: list[int], max_tokens: int) -> None:
    longest = max(lengths, default=1)
    shortest = min(lengths, default=1)
    if longest > max_tokens:
        limit = (
            f"a micro-batch of {max_tokens} (--max_tokens_per_microbatch, or"
            " --max_tokens_per_logprob_microbatch if set)"
        )
        raise ValueError(
            f"a sequence of {longest} tokens does not fit into {limit}; it is row"
            f" {lengths.index(longest)}"
        )

    if shortest < 1:
        raise ValueError(f"row {lengths.index(shortest)} has no tokens")


def _shortest(
    prefixes: np.ndarray, lengths: list[int], rows: range, num_ranks: int, limits: Limits
) -> list[list[list[int]]]:
    """Return [rank][m], the shortest of several plans: bins of similar cost run at the same time,
    most expensive first.
    """
    if len(rows) > LARGE_STEP:
        part = slice(rows.start, rows.stop)
        micro_batches = pack_large_step(np.array(lengths[part]), prefixes[part], num_ranks, limits)
        if not rows.start:
            return micro_batches
        return [[[rows.start + row for row in bin_] for bin_ in rank] for rank in micro_batches]

    prompts = [tuple(prompt) for prompt in prefixes.tolist()]
    works = {row: work(lengths[row]) - work(prompts[row][1]) for row in rows}
    prompt_works = {prompt: work(*prompt[1:]) for prompt in {prompts[row] for row in rows}}

    def cost(members: list[int]) -> int:
        return sum(works[row] for row in members) + sum(
            prompt_works[prompt] for prompt in {prompts[row] for row in members}
        )

    def pack_units(units: list[list[int]]) -> list[list[list[int]]]:
        most = Limits(limits.tokens, limits.sequences // max(map(len, units), default=1))
        sizes = [sum(lengths[row] for row in unit) for unit in units]
        costs = [cost(unit) for unit in units]
        bins = [
            sorted(row for place in bin_ for row in units[place])
            for bin_ in pack(sizes, costs, num_ranks, most)
        ]
        bins.sort(key=cost, reverse=True)
        return [bins[rank::num_ranks] for rank in range(num_ranks)]

    def time(by_rank: list[list[list[int]]]) -> int:
        return sum(max(map(cost, bins)) for bins in zip(*by_rank, strict=True))

    return min(
        map(pack_units, [[[row] for row in rows], *_by_prompt(prompts, lengths, rows, limits)]),
        key=time,
    )


def _by_prompt(
    prompts: list[tuple[int, int, int]], lengths: list[int], rows: range, limits: Limits
) -> Iterator[list[list[int]]]:
    """Yield groupings of rows that keep the rows of a prompt together; none if that saves
    little.
    """
    of_prompt: dict[tuple[int, int, int], list[int]] = {}
    for row in rows:
        of_prompt.setdefault(prompts[row], []).append(row)
    saved = sum(
        (tokens + media) * (len(members) - 1) for (_, tokens, media), members in of_prompt.items()
    )

    if saved > MIN_SAVING * sum(lengths[row] for row in rows):
        for parts in PARTS if len(of_prompt) <= MANY_PROMPTS else PARTS[:1]:
            yield [
                unit
                for members in of_prompt.values()
                for unit in _units(lengths, members, parts, limits)
            ]


def _units(
    lengths: list[int], members: list[int], parts: int, limits: Limits
) -> Iterator[list[int]]:
    """Yield the rows in `parts` parts of similar size, or in more, so that each fits into a
    micro-batch.
    """
    at_most = min(-(-len(members) // parts), limits.sequences)
    for start in range(0, len(members), at_most):
        yield from _in_order(lengths, members[start : start + at_most], limits)


def _dynamic(
    lengths: list[int], rows: range, num_ranks: int, limits: Limits
) -> list[list[list[int]]]:
    """Return [rank][m]: rows sorted by length, longest first, dealt to the ranks in turn; all ranks
    split at the same indices.
    """
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    shares = [ordered[rank::num_ranks] for rank in range(num_ranks)]
    cuts = [0]
    while cuts[-1] < len(shares[0]):
        fitting = limits.tokens // lengths[shares[0][cuts[-1]]]
        cuts.append(cuts[-1] + min(fitting, limits.sequences))
    return [
        [share[start:end] for start, end in zip(cuts, cuts[1:], strict=False)] for share in shares
    ]


def _consecutive_rows(
    lengths: list[int], rows: range, num_ranks: int, limits: Limits
) -> list[list[list[int]]]:
    """Return [rank][m]: consecutive rows for every rank and in every micro-batch."""
    ends = [len(rows) * (rank + 1) // num_ranks for rank in range(num_ranks)]
    by_rank = [
        _in_order(lengths, rows[start:end], limits)
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    count = max(map(len, by_rank))
    return [
        [*micro_batches, *([] for _ in range(count - len(micro_batches)))]
        for micro_batches in by_rank
    ]


def _in_order(lengths: list[int], rows: Sequence[int], limits: Limits) -> list[list[int]]:
    micro_batches: list[list[int]] = []
    free = 0
    for row in rows:
        if lengths[row] > free or len(micro_batches[-1]) == limits.sequences:
            micro_batches.append([])
            free = limits.tokens
        micro_batches[-1].append(row)
        free -= lengths[row]
    return micro_batches
