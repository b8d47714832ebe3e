"""Plan one optimizer step with many sequences, using vectorized numpy operations.

Ranks wait for the most expensive of the micro-batches that run at the same time. When thousands of
micro-batches are sorted by cost, neighbours cost nearly the same, so the total waiting time is at
most the cost of the most expensive one. What remains is to need few micro-batches.
"""

from collections.abc import Callable, Iterator

import numpy as np

from lightrft.batching.bin_packing import Limits, work
from lightrft.batching.prefix_sharing import MIN_SAVING

Column = np.ndarray
MAX_UNIT = 256
"""Most rows of a prompt that are kept together."""
FEW_PLACED = 1 / 8
"""A pass must place this fraction of the remaining sequences, or new micro-batches are opened."""


def pack_large_step(
    lengths: Column, prompts: Column, num_ranks: int, limits: Limits
) -> list[list[list[int]]]:
    """Return the micro-batches of each rank: [rank][m] are indices in `lengths` [N].

    The most expensive micro-batches come first. Sequences of a prompt share a micro-batch if that
    makes the plan shorter. `prompts` [N, 3]: see planner.Prompts.
    """
    cost_of = _cost(lengths, prompts)
    plans = [
        _fill(unit, lengths, num_ranks, limits) for unit in _groupings(lengths, prompts, limits)
    ]
    bins = min(plans, key=lambda bins: np.sort(cost_of(bins))[::-1][::num_ranks].sum())
    return _by_rank(bins, cost_of(bins), num_ranks)


def _groupings(lengths: Column, prompts: Column, limits: Limits) -> Iterator[Column]:
    """Yield the unit of each sequence, [N] each: alone, and by prompt if that saves enough."""
    yield np.arange(len(lengths))
    order = np.lexsort((prompts[:, 1], prompts[:, 0]))
    new = np.append(True, (np.diff(prompts[order], axis=0) != 0).any(1))
    if prompts[:, 1:].sum() - prompts[order[new], 1:].sum() <= MIN_SAVING * lengths.sum():
        return

    # Rows of a prompt join one unit until a micro-batch is full; the next row begins another.
    starts = new.nonzero()[0][new.cumsum() - 1]
    place = (np.arange(len(order)) - starts) % min(MAX_UNIT, limits.sequences)
    unit = np.empty_like(order)

    first = order.copy()
    tokens = np.zeros_like(order)
    for number in range(int(place.max()) + 1):
        members = (place == number).nonzero()[0]
        sizes = lengths[order[members]]
        if number:
            combined = tokens[members - 1] + sizes
            joins = combined <= limits.tokens
            first[members] = np.where(joins, first[members - 1], order[members])
            sizes = np.where(joins, combined, sizes)
        tokens[members] = sizes

    unit[order] = np.unique(first, return_inverse=True)[1]
    yield unit


def _fill(unit: Column, lengths: Column, num_ranks: int, limits: Limits) -> Column:
    """Assign a micro-batch to each sequence: [N].

    Each pass puts the longest remaining units into the emptiest micro-batches.
    """
    sizes = np.bincount(unit, lengths).astype(np.int64)
    counts = np.bincount(unit)
    alone = (2 * sizes > limits.tokens).sum()  # no two of these share a micro-batch
    needed = max(-(-sizes.sum() // limits.tokens), -(-counts.sum() // limits.sequences), alone)
    free = np.empty(0, np.int64)
    places = np.empty(0, np.int64)

    bins = np.empty_like(sizes)
    left = np.argsort(-sizes, kind="stable")
    while len(left):
        opened = num_ranks * -(-int(needed) // num_ranks)
        free = np.append(free, np.full(opened, limits.tokens))

        places = np.append(places, np.full(opened, limits.sequences))
        placed = len(left)
        while len(left) and placed >= FEW_PLACED * len(left):
            missed = []
            for start in range(0, len(left), len(free)):
                units = left[start : start + len(free)]
                most_free = np.argsort(-free, kind="stable")[: len(units)]
                fits = (sizes[units] <= free[most_free]) & (counts[units] <= places[most_free])
                inside = units[fits]
                into = most_free[fits]
                bins[inside] = into
                free[into] -= sizes[inside]
                places[into] -= counts[inside]
                missed.append(units[~fits])

            placed = len(left)
            left = np.concatenate(missed)
            placed -= len(left)

        needed = max(-(-sizes[left].sum() // limits.tokens), 1)

    return bins[unit]


def _cost(lengths: Column, prompts: Column) -> Callable[[Column], Column]:
    """Return a function that turns assignments [N] into the cost of each micro-batch.

    A micro-batch computes each prompt once.
    """
    key = (
        np.unique(prompts[:, 0], return_inverse=True)[1] * (prompts[:, 1].max() + 1) + prompts[:, 1]
    )

    def cost(bins: Column) -> Column:
        order = np.lexsort((key, bins))
        again = (np.diff(bins[order]) == 0) & (np.diff(key[order]) == 0)
        repeated = order[1:][again]
        spared = np.bincount(
            bins[repeated], work(*prompts[repeated, 1:].T), minlength=int(bins.max()) + 1
        )
        return np.bincount(bins, work(lengths, prompts[:, 2])) - spared

    return cost


def _by_rank(bins: Column, costs: Column, num_ranks: int) -> list[list[list[int]]]:
    place = np.empty(len(costs), np.int64)
    place[np.argsort(-costs, kind="stable")] = np.arange(len(costs))
    rows = np.argsort(place[bins], kind="stable").tolist()
    count = num_ranks * -(-int(place[bins].max() + 1) // num_ranks)
    ends = np.bincount(place[bins], minlength=count).cumsum().tolist()
    micro_batches = [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [micro_batches[rank::num_ranks] for rank in range(num_ranks)]
