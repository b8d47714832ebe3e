"""Pack sequences into bins of equal cost, for one optimizer step of the packed plan.

Several heuristics are tried, and the cheapest result is kept. Ranks wait for each other at every
micro-batch, so a plan takes the sum over micro-batches of the most expensive bin among the ranks.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from lightrft.batching.local_search import LocalSearch

ATTENTION_SCALE = 6 * 4096
"""A sequence of so many tokens, six times the hidden size, spends as much on attention as on matrix
products."""

GOOD_ENOUGH = 1.002
"""Ratio to perfect balance that is good enough to try no further heuristics."""

MAX_LOCAL_SEARCH = 1024
"""Most sequences for a local search afterwards. Only a few sequences are difficult to balance."""

Bin = list[int]


def work(length: int, media: int = 0) -> int:
    """Return the cost of one sequence as an integer.

    Matrix products grow linearly with the length, and attention grows quadratically. `media` is the
    cost of the sequence's media in tokens.
    """
    return (length + media) * ATTENTION_SCALE + length * length


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum numbers of tokens and sequences in one micro-batch."""

    tokens: int
    sequences: int


def pack(sizes: list[int], works: list[int], num_ranks: int, limits: Limits) -> list[Bin]:
    """Pack items into bins, most expensive first; the number of bins is a multiple of the ranks.

    `sizes` are tokens, and `works` are costs.
    """
    order = np.argsort(-np.array(sizes), kind="stable").tolist()
    packer = Packer([sizes[row] for row in order], [works[row] for row in order], num_ranks, limits)
    return [[order[place] for place in bin_] for bin_ in packer.best()]


class Packer:
    """Heuristics for filling bins.

    Sequences are indices of `sizes`: the lengths, longest first.
    """

    def __init__(self, sizes: list[int], works: list[int], num_ranks: int, limits: Limits):
        self.sizes = sizes
        self.works = works
        self.num_ranks = num_ranks
        self.limits = limits

    def best(self) -> list[Bin]:
        """Return the cheapest result of three heuristics; a local search improves small ones."""
        # Many sequences balance almost perfectly without a search.
        few = len(self.sizes) <= MAX_LOCAL_SEARCH
        enough = sum(self.works) / self.num_ranks * (1 if few else GOOD_ENOUGH)
        best: list[Bin] = []
        for way in (self.even, self.staggered, self.roomy):
            bins = self._most_expensive_first(way(list(range(len(self.sizes)))))
            if not best or self._time(bins) < self._time(best):
                best = bins
            if self._time(best) <= enough:
                return best
        return self._improve(best) if few else best

    def even(self, rows: Bin) -> list[Bin]:
        """Fill all bins to nearly equal cost.

        This is best if no sequence is more expensive than an average bin.
        """
        return self._fill(rows, self.num_ranks * self._fewest(rows), grow=True)[0]

    def roomy(self, rows: Bin) -> list[Bin]:
        """Fill one bin more per rank than even(), so that long sequences need not share a bin."""
        return self._fill(rows, self.num_ranks * (self._fewest(rows) + 1), grow=True)[0]

    def staggered(self, rows: Bin) -> list[Bin]:
        """Fill one bin per rank up to the cost of the longest sequence, as long as that is needed.

        Once the longest sequence fits an average bin, even() does the rest.
        """
        bins = []
        left = sum(self.works)
        while rows and self.works[rows[0]] * self.num_ranks * self._fewest(rows) > left:
            full, rows = self._fill(rows, self.num_ranks, max_work=self.works[rows[0]])
            left -= sum(self._work(bin_) for bin_ in full)
            bins += full
        return bins + self.even(rows)

    def _improve(self, bins: list[Bin]) -> list[Bin]:
        """Move and swap sequences out of the bins that other ranks wait for."""
        tokens = self.limits.tokens
        sequences = self.limits.sequences
        search = LocalSearch(
            self.works,
            self.sizes,
            bins,
            num_ranks=self.num_ranks,
            max_tokens=tokens,
            max_sequences=sequences,
        )
        while search.round():
            pass

        return self._most_expensive_first(search.bins())

    def _most_expensive_first(self, bins: list[Bin]) -> list[Bin]:
        return sorted(bins, key=lambda bin_: (-self._work(bin_), bin_))

    def _time(self, bins: list[Bin]) -> int:
        """Return the time of bins sorted by cost: ranks wait for the longest one."""
        return sum(self._work(bin_) for bin_ in bins[:: self.num_ranks])

    def _work(self, bin_: Bin) -> int:
        return sum([self.works[row] for row in bin_])

    def _fewest(self, rows: Bin) -> int:
        """Return a lower bound on the bins per rank that the rows need."""
        by_tokens = -(-sum([self.sizes[row] for row in rows]) // self.limits.tokens)
        by_sequences = -(-len(rows) // self.limits.sequences)
        # No two of these sequences fit into one bin.
        alone = sum([2 * self.sizes[row] > self.limits.tokens for row in rows])
        return -(-max(by_tokens, by_sequences, alone) // self.num_ranks)

    def _fill(
        self, rows: Bin, count: int, *, grow: bool = False, max_work: int | None = None
    ) -> tuple[list[Bin], Bin]:
        """Put each row, longest first, into the cheapest of `count` bins that has room.

        With `grow`, one more bin per rank is opened when no bin has room. Return the bins and the
        rows that are left.
        """
        bins: list[Bin] = [[] for _ in range(count)]
        free = [self.limits.tokens] * count
        open_ = [(0, index) for index in range(count)]  # heap: cheapest first

        # Heap of bins that were too full for some row, emptiest first: shorter rows may fit.
        parked: list[tuple[int, int, int]] = []
        rest: Bin = []
        for row in rows:
            size = self.sizes[row]
            cost = self.works[row]
            while parked and -parked[0][0] >= size:
                heapq.heappush(open_, heapq.heappop(parked)[1:])

            while open_ and free[open_[0][1]] < size:
                load, index = heapq.heappop(open_)
                heapq.heappush(parked, (-free[index], load, index))

            if not open_ and grow:
                open_ = [(0, index) for index in range(len(bins), len(bins) + self.num_ranks)]
                bins += [[] for _ in open_]
                free += [self.limits.tokens] * len(open_)

            if not open_ or (max_work is not None and open_[0][0] + cost > max_work):
                rest.append(row)
                continue

            load, index = open_[0]
            bins[index].append(row)
            free[index] -= size

            if len(bins[index]) < self.limits.sequences:
                heapq.heapreplace(open_, (load + cost, index))
            else:
                heapq.heappop(open_)

        return bins, rest
