"""Pack sequences into bins of equal cost, for one optimizer step of the packed plan.

Several heuristics are tried, and the cheapest result is kept. Ranks wait for each other at every
micro-batch, so a plan takes the sum over micro-batches of the most expensive bin among the ranks.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lightrft.batching.local_search import LocalSearch

ATTENTION_SCALE = 6 * 4096
"""A sequence of so many tokens, six times the hidden size, spends as much on attention as on matrix
products."""

GOOD_ENOUGH = 1.005
"""Ratio to perfect balance that is good enough for many sequences to try no further heuristics."""

FEW = 2048
"""Most sequences for all heuristics and a local search. Only a few sequences are difficult to
balance."""

MOST_BINS = 2**24
"""More bins than any step has."""

Int = TypeVar("Int", int, np.ndarray)


def work(length: Int, media: Int | int = 0) -> Int:
    """Return the cost of one sequence as an integer, or of several as an array.

    Matrix products grow linearly with the length, and attention grows quadratically. `media` is the
    cost of the sequence's media in tokens.
    """
    return (length + media) * ATTENTION_SCALE + length * length


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum numbers of tokens and sequences in one micro-batch."""

    tokens: int
    sequences: int


def pack(sizes: np.ndarray, works: np.ndarray, num_ranks: int, limits: Limits) -> np.ndarray:
    """Return the bin of each item, [N]; bins are numbered from 0, and some may be empty.

    `sizes` [N] are tokens, and `works` [N] are costs.
    """
    order = np.argsort(-sizes, kind="stable")
    bin_of = np.empty(len(order), np.int64)
    bin_of[order] = Packer(sizes[order], works[order], num_ranks, limits).best()
    return bin_of


class Packer:
    """Heuristics for filling bins.

    Sequences are indices of `sizes`: the lengths, longest first. A heuristic returns the bin of
    each sequence that it gets.
    """

    def __init__(self, sizes: np.ndarray, works: np.ndarray, num_ranks: int, limits: Limits):
        self.sizes = sizes
        self.works = works
        self.num_ranks = num_ranks
        self.limits = limits

    def best(self) -> np.ndarray:
        """Return the cheapest result of several heuristics; a local search improves small ones."""
        few = len(self.sizes) <= FEW
        # Many sequences balance almost perfectly, so the heuristics for special cases are left out.
        ways = [self.even, self.staggered, *([self.roomy, self.tight] if few else [])]
        enough = self.works.sum() / self.num_ranks * (1 if few else GOOD_ENOUGH)
        plans = []
        for way in ways:
            bin_of = way(np.arange(len(self.sizes)))
            plans.append((self._time(bin_of), bin_of))
            if plans[-1][0] <= enough:
                return bin_of

        _, best = min(plans, key=lambda plan: plan[0])
        return self._improve(best) if few else best

    def even(self, rows: np.ndarray) -> np.ndarray:
        """Fill all bins to nearly equal cost.

        This is best if no sequence is more expensive than an average bin.
        """
        return self._fill(rows, self.num_ranks * self._fewest(rows))

    def roomy(self, rows: np.ndarray) -> np.ndarray:
        """Fill one bin more per rank than even(), so that long sequences need not share a bin."""
        return self._fill(rows, self.num_ranks * (self._fewest(rows) + 1))

    def staggered(self, rows: np.ndarray) -> np.ndarray:
        """Fill one bin per rank up to the cost of the longest sequence, as long as that is needed.

        Once the longest sequence fits an average bin, even() does the rest.
        """
        bin_of = np.empty(len(rows), np.int64)
        left = self.works[rows].sum()
        first = 0
        while len(rows) and self.works[rows[0]] * self.num_ranks * self._fewest(rows) > left:
            bins = self._fill(rows, self.num_ranks, max_work=int(self.works[rows[0]]))
            inside = bins >= 0
            bin_of[rows[inside]] = first + bins[inside]
            left -= self.works[rows[inside]].sum()
            rows = rows[~inside]
            first += self.num_ranks
        bin_of[rows] = first + self.even(rows)
        return bin_of

    def tight(self, rows: np.ndarray) -> np.ndarray:
        """Use few bins: put each sequence into the fullest bin with enough space.

        This is best if few combinations of sequences fill a bin, such as halves and thirds.
        """
        bin_of = []
        places: list[int] = []
        free_bins: list[tuple[int, int]] = []  # (free tokens, bin), ascending
        for size in self.sizes[rows].tolist():
            place = bisect_left(free_bins, (size, -1))
            if place == len(free_bins):
                free = self.limits.tokens
                index = len(places)
                places.append(self.limits.sequences)
            else:
                free, index = free_bins.pop(place)

            bin_of.append(index)
            places[index] -= 1
            if places[index]:
                insort(free_bins, (free - size, index))

        return np.array(bin_of, np.int64)

    def _improve(self, bin_of: np.ndarray) -> np.ndarray:
        """Move and swap sequences out of the bins that other ranks wait for."""
        search = LocalSearch(
            self.works,
            self.sizes,
            bin_of,
            num_ranks=self.num_ranks,
            max_tokens=self.limits.tokens,
            max_sequences=self.limits.sequences,
        )
        while search.round():
            pass

        return search.bins()

    def _time(self, bin_of: np.ndarray) -> int:
        """Return the time of the bins: ranks wait for the most expensive one of each turn."""
        return np.sort(np.bincount(bin_of, self.works))[::-1][:: self.num_ranks].sum()

    def _fewest(self, rows: np.ndarray) -> int:
        """Return a lower bound on the bins per rank that the rows need."""
        sizes = self.sizes[rows]
        by_tokens = -(-int(sizes.sum()) // self.limits.tokens)
        by_sequences = -(-len(rows) // self.limits.sequences)
        # No two of these sequences fit into one bin.
        alone = int((2 * sizes > self.limits.tokens).sum())
        return -(-max(by_tokens, by_sequences, alone) // self.num_ranks)

    def _fill(self, rows: np.ndarray, count: int, *, max_work: int | None = None) -> np.ndarray:
        """Put each row, longest first, into the cheapest of `count` bins that has room.

        If no bin has room, one more per rank is opened. With `max_work`, the largest cost of a bin,
        none is opened, and the bin of a row that is left is -1.
        """
        tokens = self.limits.tokens
        sizes = self.sizes[rows]
        costs = self.works[rows] * MOST_BINS
        # The first rows get a bin each: an empty bin has room, and is cheaper than all others.
        begun = min(count, len(rows)) if max_work is None and self.limits.sequences > 1 else 0
        bin_of = list(range(begun))
        used = [*sizes[:begun].tolist(), *[0] * (count - begun)]
        places = [self.limits.sequences - (bin_ < begun) for bin_ in range(count)]

        # Heap of bins, cheapest first: load times MOST_BINS, plus the bin. Plain integers are
        # compared faster than tuples, and no garbage collection follows them.
        entries = np.arange(count)
        entries[:begun] += costs[:begun]
        open_ = np.sort(entries).tolist()
        entry_of = entries.tolist()

        # Heap of bins that were too full for some row, emptiest first: shorter rows may fit. Here
        # an integer is the used tokens times MOST_BINS, plus the bin.
        parked: list[int] = []
        for size, cost in zip(sizes[begun:].tolist(), costs[begun:].tolist(), strict=True):
            while parked and parked[0] < (tokens - size + 1) * MOST_BINS:
                heapq.heappush(open_, entry_of[heapq.heappop(parked) % MOST_BINS])

            while open_ and used[open_[0] % MOST_BINS] + size > tokens:
                entry = heapq.heappop(open_)
                bin_ = entry % MOST_BINS
                entry_of[bin_] = entry
                heapq.heappush(parked, used[bin_] * MOST_BINS + bin_)

            if not open_ and max_work is None:
                open_ = list(range(len(used), len(used) + self.num_ranks))
                used += [0] * self.num_ranks
                places += [self.limits.sequences] * self.num_ranks
                entry_of += open_

            if max_work is not None and (
                not open_ or open_[0] + cost >= (max_work + 1) * MOST_BINS
            ):
                bin_of.append(-1)
                continue

            index = open_[0] % MOST_BINS
            bin_of.append(index)
            used[index] += size
            places[index] -= 1

            if places[index]:
                heapq.heapreplace(open_, open_[0] + cost)
            else:
                heapq.heappop(open_)

        return np.array(bin_of, np.int64)
