"""Assign sequences to ranks and micro-batches.

A plan is a pure function of the lengths and prompts of all sequences, so every rank computes the
same plan without communication. Batches are always flat, without padding. The three batching modes
only decide which sequences share a micro-batch.
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
"""Prompt of each row: (identifier, number of tokens, cost of the media in tokens).

Rows with equal entries begin with the same tokens and media."""

LARGE_STEP = 16384
"""Optimizer steps with more rows than this are planned with vectorized operations."""

PARTS = (1, 2, 4)
"""How many parts the rows of a prompt are split into. Few parts share more work, and many parts are
easier to balance."""
MANY_PROMPTS = 512
"""With more prompts than this, balance is good enough without splitting a prompt's rows."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows of all micro-batches: minibatches[k][rank][m] is micro-batch m of optimizer step k.

    Every rank has the same number of micro-batches in an optimizer step. Some are empty if there
    are fewer rows than ranks; they take part in the collectives with weight zero.
    """

    minibatches: list[list[list[list[int]]]]

    def rows(self, rank: int) -> list[int]:
        """Return all rows of a rank, in the order of computation."""
        return [row for minibatch in self.minibatches for rows in minibatch[rank] for row in rows]

    def local(self, rank: int) -> list[list[list[int]]]:
        """Return [k][m]: the rows of the rank's micro-batches, as positions in `rows(rank)`."""
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
    """Divide rows 0..N-1 into optimizer steps, and each step into ranks and micro-batches.

    An optimizer step has `minibatch_size` consecutive rows. With `units`, ascending numbers from 0
    for each row, a step has `minibatch_size` units, and the rows of a unit stay together.

    packed: any sequences up to max_tokens, so that all ranks finish together. Rows with equal
    `prompts` share a micro-batch if that makes the plan shorter; it computes the prompt once.
    dynamic: sequences of similar length; their number times the longest length is at most
    max_tokens. plain: max_sequences rows in the given order, or fewer if they exceed max_tokens.
    Raises ValueError for a sequence that is empty or longer than max_tokens.
    """
    _check(lengths, max_tokens)
    limits = Limits(max_tokens, max_sequences or max(len(lengths), 1))
    if prompts is None:
        # Without prompts every row is a prompt of its own, of no tokens.
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
    """Return [rank][m], the shortest of several plans, most expensive micro-batches first."""
    if len(rows) > LARGE_STEP:
        part = slice(rows.start, rows.stop)
        micro_batches = pack_large_step(np.array(lengths[part]), prefixes[part], num_ranks, limits)
        # The rows of a step are planned from 0, so the number of earlier rows is added afterwards.
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
    """Yield groupings that keep the rows of a prompt together, unless that saves little."""
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
    """Split a prompt's rows into `parts` parts, or more, so that each fits a micro-batch."""
    at_most = min(-(-len(members) // parts), limits.sequences)
    for start in range(0, len(members), at_most):
        yield from _in_order(lengths, members[start : start + at_most], limits)


def _dynamic(
    lengths: list[int], rows: range, num_ranks: int, limits: Limits
) -> list[list[list[int]]]:
    """Return [rank][m]: rows sorted by length, longest first, dealt to the ranks in turn.

    All ranks split at the same indices.
    """
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    shares = [ordered[rank::num_ranks] for rank in range(num_ranks)]
    cuts = [0]
    # Rank 0 has the longest row of every turn, so what fits there fits everywhere.
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
    # Ranks take part in every collective, so short ones get empty micro-batches.
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
