"""Packing of sequences into bins of equal cost, for one optimizer step of the packed plan.

Several heuristics are tried and the cheapest result is kept. The ranks wait for each other at every
micro-batch, so the time of a plan is the sum, over micro-batches, of the most expensive bin among
the ranks.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from lightrft.batching.local_search import LocalSearch

ATTENTION_SCALE = 6 * 4096
"""Length in tokens at which a sequence's attention costs as much as its matrix products: six times
the hidden size."""

GOOD_ENOUGH = 1.002
"""Ratio to perfect balance below which a plan is accepted without trying further heuristics."""

MAX_LOCAL_SEARCH = 1024
"""Maximum number of sequences for a local search afterwards: balance is difficult only for few
sequences."""

Bin = list[int]


def work(length: int, media: int = 0) -> int:
    """Return the cost of one sequence as an integer: matrix products grow linearly with its length,
    attention quadratically.

    `media` is the cost of its media in tokens.
    """
    return (length + media) * ATTENTION_SCALE + length * length


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum numbers of tokens and sequences of one micro-batch."""

    tokens: int
    sequences: int


def pack(sizes: list[int], works: list[int], num_ranks: int, limits: Limits) -> list[Bin]:
    """Pack items of given sizes (tokens) and costs into bins, most expensive first, their number a
    multiple of the ranks.
    """
    order = np.argsort(-np.array(sizes), kind="stable").tolist()
    packer = Packer([sizes[row] for row in order], [works[row] for row in order], num_ranks, limits)
    return [[order[place] for place in bin_] for bin_ in packer.best()]


class Packer:
    """Heuristics for filling bins.

    Sequences are indices of `sizes`, which are their lengths, longest first.
    """

    def __init__(self, sizes: list[int], works: list[int], num_ranks: int, limits: Limits):
        self.sizes = sizes
        self.works = works
        self.num_ranks = num_ranks
        self.limits = limits

    def best(self) -> list[Bin]:
        """Return the cheapest result of three heuristics, improved by a local search for few
        sequences.
        """
        few = len(self.sizes) <= MAX_LOCAL_SEARCH
        enough = sum(self.works) / self.num_ranks * (1 if few else GOOD_ENOUGH)
        best: list[Bin] = []
        for way in (self.even, self.staggered, self.roomy):
            bins = self._dearest_first(way(list(range(len(self.sizes)))))
            if not best or self._time(bins) < self._time(best):
                best = bins
            if self._time(best) <= enough:
                return best
        return self._improve(best) if few else best

    def even(self, rows: Bin) -> list[Bin]:
        """Fill all bins to nearly equal cost: best if no sequence is more expensive than an average
        bin.
        """
        return self._fill(rows, self.num_ranks * self._fewest(rows), grow=True)[0]

    def roomy(self, rows: Bin) -> list[Bin]:
        """Fill one bin more per rank than even(): if sequences hardly fit, long ones then need not
        share a bin.
        """
        return self._fill(rows, self.num_ranks * (self._fewest(rows) + 1), grow=True)[0]

    def staggered(self, rows: Bin) -> list[Bin]:
        """Fill one bin per rank up to the cost of the longest sequence while that exceeds an
        average bin; then use even().
        """
        bins = []
        left = sum(self.works)
        while rows and self.works[rows[0]] * self.num_ranks * self._fewest(rows) > left:
            full, rows = self._fill(rows, self.num_ranks, max_work=self.works[rows[0]])
            left -= sum(self._work(bin_) for bin_ in full)
            bins += full
        return bins + self.even(rows)

    def _improve(self, bins: list[Bin]) -> list[Bin]:
        """Return the bins after moving and swapping sequences out of the bins that the other ranks
        wait for.
        """
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

        return self._dearest_first(search.bins())

    def _dearest_first(self, bins: list[Bin]) -> list[Bin]:
        return sorted(bins, key=lambda bin_: (-self._work(bin_), bin_))

    def _time(self, bins: list[Bin]) -> int:
        """Return the time of bins sorted by cost: the ranks wait for the most expensive bin at
        every micro-batch.
        """
        return sum(self._work(bin_) for bin_ in bins[:: self.num_ranks])

    def _work(self, bin_: Bin) -> int:
        return sum([self.works[row] for row in bin_])

    def _fewest(self, rows: Bin) -> int:
        """Return a lower bound on the number of bins per rank that the rows need."""
        by_tokens = -(-sum([self.sizes[row] for row in rows]) // self.limits.tokens)
        by_sequences = -(-len(rows) // self.limits.sequences)
        # no two of them share a bin
        alone = sum([2 * self.sizes[row] > self.limits.tokens for row in rows])
        return -(-max(by_tokens, by_sequences, alone) // self.num_ranks)

    def _fill(
        self, rows: Bin, count: int, *, grow: bool = False, max_work: int | None = None
    ) -> tuple[list[Bin], Bin]:
        """Put each row, longest first, into the cheapest of `count` bins with enough space; return
        bins and remaining rows.

        With `grow`, one more bin per rank is opened when no bin has enough space.
        """
        bins: list[Bin] = [[] for _ in range(count)]
        free = [self.limits.tokens] * count
        open_ = [(0, index) for index in range(count)]  # heap: cheapest first

        # heap of bins too full for the rows so far: emptiest first
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
