"""The planner: which rank computes which sequences, in which micro-batch.

A pure function of the lengths of all sequences, so every rank makes the same plan and nobody has to send it.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

ATTENTION_SCALE = 6 * 4096
"""Tokens at which a sequence's attention costs as much as its matrix products: six times the hidden size."""

GOOD_ENOUGH = 1.02
"""A plan within two percent of perfect balance is taken as it is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one micro-batch may hold."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Plan:
    """minibatches[k][rank][m]: the rows of micro-batch m that `rank` computes for optimizer step k.

    Every rank has the same number of micro-batches in an optimizer step. One can be empty, when there are fewer rows
    than ranks; it takes part in the collectives with no weight.
    """

    minibatches: list[list[list[list[int]]]]

    def rows(self, rank: int) -> list[int]:
        """All rows of a rank, in the order in which it computes them."""
        return [row for minibatch in self.minibatches for rows in minibatch[rank] for row in rows]

    def local(self, rank: int) -> list[list[list[int]]]:
        """[k][m]: rows of the rank's micro-batches as positions in `rows(rank)`."""
        position = {row: place for place, row in enumerate(self.rows(rank))}
        return [[[position[row] for row in rows] for rows in minibatch[rank]] for minibatch in self.minibatches]


def plan(
    lengths: list[int], *, num_ranks: int, minibatch_size: int, max_tokens: int, max_sequences: int | None = None
) -> Plan:
    """Split rows 0..N-1 into consecutive optimizer steps of `minibatch_size`, each balanced over ranks and micro-batches.

    max_tokens and max_sequences bound one micro-batch. ValueError when one sequence is longer than max_tokens.
    """
    too_long = next((length for length in lengths if length > max_tokens), None)
    if too_long is not None:
        limit = f"a micro-batch of {max_tokens} (--max_tokens_per_microbatch)"
        raise ValueError(f"a sequence of {too_long} tokens does not fit into {limit}")
    limits = Limits(max_tokens, max_sequences or max(len(lengths), 1))
    steps = [range(start, min(start + minibatch_size, len(lengths))) for start in range(0, len(lengths), minibatch_size)]
    return Plan([_deal(_bins(lengths, rows, num_ranks, limits), lengths, num_ranks) for rows in steps])


def cost(length: int) -> float:
    """Work of one sequence, in tokens: its matrix products grow with its length, its attention with the square."""
    return length + length * length / ATTENTION_SCALE


def _bins(lengths: list[int], rows: range, num_ranks: int, limits: Limits) -> list[list[int]]:
    """Micro-batches for the rows, a multiple of the ranks: the cheaper of two ways where the first leaves ranks waiting."""
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    even = _even(lengths, ordered, num_ranks, limits)
    perfect = sum(cost(lengths[row]) for row in rows) / num_ranks
    if _duration(even, lengths, num_ranks) <= GOOD_ENOUGH * perfect:
        return even
    staggered = _staggered(lengths, ordered, num_ranks, limits)
    return min(even, staggered, key=lambda bins: _duration(bins, lengths, num_ranks))


def _even(lengths: list[int], rows: list[int], num_ranks: int, limits: Limits) -> list[list[int]]:
    """As few bins as hold the rows, all of nearly equal cost: best where no sequence is dearer than an average bin."""
    count, bins, rest = 0, [], rows
    while rest:
        count += num_ranks * _fewest(lengths, rest, num_ranks, limits)
        bins, rest = _fill(lengths, rows, count, limits)
    return bins


def _staggered(lengths: list[int], rows: list[int], num_ranks: int, limits: Limits) -> list[list[int]]:
    """While a sequence is dearer than an average bin, one bin per rank filled up to its cost; then even ones."""
    bins = []
    while rows and cost(lengths[rows[0]]) * num_ranks * _fewest(lengths, rows, num_ranks, limits) > _cost(rows, lengths):
        filled, rows = _fill(lengths, rows, num_ranks, limits, max_cost=cost(lengths[rows[0]]))
        bins += filled
    return bins + _even(lengths, rows, num_ranks, limits)


def _fewest(lengths: list[int], rows: list[int], num_ranks: int, limits: Limits) -> int:
    """Bins per rank without which the rows cannot fit."""
    by_tokens = -(-sum(lengths[row] for row in rows) // limits.tokens)
    by_sequences = -(-len(rows) // limits.sequences)
    alone = sum(2 * lengths[row] > limits.tokens for row in rows)  # no two of them share a bin
    return -(-max(by_tokens, by_sequences, alone) // num_ranks)


def _fill(
    lengths: list[int], rows: Sequence[int], count: int, limits: Limits, max_cost: float = math.inf
) -> tuple[list[list[int]], list[int]]:
    """Rows, longest first, each into the cheapest of `count` bins that has room; and the rows that found none."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [limits.tokens] * count
    cheapest = [(0.0, index) for index in range(count)]
    parked: list[tuple[int, float, int]] = []  # bins with no room for the rows so far, the roomiest first
    rest = []
    for row in rows:
        length = lengths[row]
        while parked and -parked[0][0] >= length:
            heapq.heappush(cheapest, heapq.heappop(parked)[1:])
        while cheapest and room[cheapest[0][1]] < length:
            spent, index = heapq.heappop(cheapest)
            heapq.heappush(parked, (-room[index], spent, index))
        if not cheapest or cheapest[0][0] + cost(length) > max_cost:
            rest.append(row)
            continue
        spent, index = heapq.heappop(cheapest)
        bins[index].append(row)
        room[index] -= length
        if len(bins[index]) < limits.sequences:
            heapq.heappush(cheapest, (spent + cost(length), index))
    return bins, rest


def _deal(bins: list[list[int]], lengths: list[int], num_ranks: int) -> list[list[list[int]]]:
    """[rank][m]: bins of similar cost run at the same time on different ranks; the dearest first."""
    ordered = sorted(bins, key=lambda rows: (-_cost(rows, lengths), rows))
    return [ordered[rank::num_ranks] for rank in range(num_ranks)]


def _duration(bins: list[list[int]], lengths: list[int], num_ranks: int) -> float:
    """Time of the bins once dealt: the ranks wait for the dearest at every micro-batch."""
    return sum(sorted((_cost(rows, lengths) for rows in bins), reverse=True)[::num_ranks])


def _cost(rows: list[int], lengths: list[int]) -> float:
    return sum(cost(lengths[row]) for row in rows)
