"""The packed plan of one optimizer step where sequences are many, in whole columns instead of one sequence after the other.

Ranks wait for the dearest of the micro-batches that run side by side. Sorted by cost, neighbours among thousands cost nearly
the same: all waiting together is at most the dearest micro-batch. So only the number of micro-batches is left to be made small.
"""

from collections.abc import Callable, Iterator

import numpy as np

from lightrft.batching.bin_packing import Limits, work
from lightrft.batching.prefix_sharing import MIN_SAVING

Column = np.ndarray
TOGETHER = 256
"""At most so many rows of a prompt are kept together."""
FEW_PLACED = 1 / 8
"""Where a pass over the sequences left places fewer, new micro-batches are opened."""


def pack_large_step(lengths: Column, prompts: Column, num_ranks: int, limits: Limits) -> list[list[list[int]]]:
    """[rank][m]: positions in `lengths` [N] of the sequences of micro-batch m, dearest first; sequences of a prompt meet where
    that is shorter. `prompts` [N, 2]: see planner.Prompts."""
    spent = _cost(lengths, prompts)
    ways = [_fill(unit, lengths, num_ranks, limits) for unit in _ways(lengths, prompts, limits)]
    bins = min(ways, key=lambda bins: np.sort(spent(bins))[::-1][::num_ranks].sum())
    return _by_rank(bins, spent(bins), num_ranks)


def _ways(lengths: Column, prompts: Column, limits: Limits) -> Iterator[Column]:
    """[N] each: the unit that a sequence belongs to; itself, or the sequences of its prompt where that saves something."""
    yield np.arange(len(lengths))
    order = np.lexsort((prompts[:, 1], prompts[:, 0]))
    new = np.append(True, (np.diff(prompts[order], axis=0) != 0).any(1))
    if prompts[:, 1].sum() - prompts[order[new], 1].sum() <= MIN_SAVING * lengths.sum():
        return
    starts = new.nonzero()[0][new.cumsum() - 1]
    place = (np.arange(len(order)) - starts) % min(TOGETHER, limits.sequences)
    unit, first = np.empty_like(order), order.copy()
    tokens = np.zeros_like(order)
    for number in range(int(place.max()) + 1):
        here = (place == number).nonzero()[0]
        sizes = lengths[order[here]]
        if number:
            whole = tokens[here - 1] + sizes
            joins = whole <= limits.tokens
            first[here] = np.where(joins, first[here - 1], order[here])
            sizes = np.where(joins, whole, sizes)
        tokens[here] = sizes
    unit[order] = np.unique(first, return_inverse=True)[1]
    yield unit


def _fill(unit: Column, lengths: Column, num_ranks: int, limits: Limits) -> Column:
    """[N]: the micro-batch of each sequence. In passes: the longest units that are left, each into the roomiest there is."""
    sizes, counts = np.bincount(unit, lengths).astype(np.int64), np.bincount(unit)
    alone = (2 * sizes > limits.tokens).sum()  # no two of them share a micro-batch
    needed = max(-(-sizes.sum() // limits.tokens), -(-counts.sum() // limits.sequences), alone)
    room, places = np.empty(0, np.int64), np.empty(0, np.int64)
    bins, left = np.empty_like(sizes), np.argsort(-sizes, kind="stable")
    while len(left):
        opened = num_ranks * -(-int(needed) // num_ranks)
        room, places = np.append(room, np.full(opened, limits.tokens)), np.append(places, np.full(opened, limits.sequences))
        placed = len(left)
        while len(left) and placed >= FEW_PLACED * len(left):
            missed = []
            for start in range(0, len(left), len(room)):
                units = left[start : start + len(room)]
                roomiest = np.argsort(-room, kind="stable")[: len(units)]
                fits = (sizes[units] <= room[roomiest]) & (counts[units] <= places[roomiest])
                inside, into = units[fits], roomiest[fits]
                bins[inside] = into
                room[into] -= sizes[inside]
                places[into] -= counts[inside]
                missed.append(units[~fits])
            placed, left = len(left), np.concatenate(missed)
            placed -= len(left)
        needed = max(-(-sizes[left].sum() // limits.tokens), 1)
    return bins[unit]


def _cost(lengths: Column, prompts: Column) -> Callable[[Column], Column]:
    """What each micro-batch costs, of [N] its number for each sequence: a prompt is computed once in a micro-batch."""
    key = np.unique(prompts[:, 0], return_inverse=True)[1] * (prompts[:, 1].max() + 1) + prompts[:, 1]

    def cost(bins: Column) -> Column:
        order = np.lexsort((key, bins))
        again = (np.diff(bins[order]) == 0) & (np.diff(key[order]) == 0)
        repeated = order[1:][again]
        spared = np.bincount(bins[repeated], work(prompts[repeated, 1]), minlength=int(bins.max()) + 1)
        return np.bincount(bins, work(lengths)) - spared

    return cost


def _by_rank(bins: Column, spent: Column, num_ranks: int) -> list[list[list[int]]]:
    place = np.empty(len(spent), np.int64)
    place[np.argsort(-spent, kind="stable")] = np.arange(len(spent))
    rows = np.argsort(place[bins], kind="stable").tolist()
    count = num_ranks * -(-int(place[bins].max() + 1) // num_ranks)
    ends = np.bincount(place[bins], minlength=count).cumsum().tolist()
    micro_batches = [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [micro_batches[rank::num_ranks] for rank in range(num_ranks)]
