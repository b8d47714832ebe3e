"""Pack sequences into bins of equal cost, for one optimizer step of the packed plan.

Several heuristics are tried, and the cheapest result is kept. Ranks wait for each other at every
micro-batch, so a plan takes the sum over micro-batches of the most expensive bin among the ranks.
"""

import heapq
from bisect import bisect_left, insort
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
        """Return the cheapest result of four heuristics; a local search improves small ones."""
        # Many sequences balance almost perfectly without a search.
        few = len(self.sizes) <= MAX_LOCAL_SEARCH
        enough = sum(self.works) / self.num_ranks * (1 if few else GOOD_ENOUGH)
        best: list[Bin] = []
        # tight() is hardly ever the cheapest one, and yet no plan may be slower than its bins.
        for way in (self.even, self.staggered, self.roomy, self.tight):
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

    def tight(self, rows: Bin) -> list[Bin]:
        """Minimize the number of bins with modified first fit decreasing.

        Source: Johnson and Garey, Journal of Complexity 1, 1985.

        A sequence longer than half a bin gets its own bin. One longer than a third is added, or two
        longer than a sixth, or whatever else fits; the remaining sequences go to bins without such
        a long one.
        """
        sizes = self.sizes
        tokens = self.limits.tokens
        bins = [[row] for row in rows if 2 * sizes[row] > tokens]

        free = [tokens - sizes[row] for (row,) in bins]
        rest = rows[len(bins) :]
        if self.limits.sequences > 1:
            for index, bin_ in enumerate(bins):  # fullest bins first
                self._add_longest(bin_, free, index, rest, above=tokens / 3)
            if self.limits.sequences > 2:
                self._add_pairs(bins, free, rest)
            for index, bin_ in enumerate(bins):
                while len(bin_) < self.limits.sequences and self._add_longest(
                    bin_, free, index, rest
                ):
                    pass

        bins += self._best_fit(rest)
        return bins + [[] for _ in range(-len(bins) % self.num_ranks)]

    def _add_pairs(self, bins: list[Bin], free: list[int], rest: Bin) -> None:
        """Add the shortest sequence between a sixth and a third, and the longest that then fits.

        The emptiest bins come first.
        """
        for index in reversed(range(len(bins))):
            small = (
                self._first_within(rest, self.limits.tokens // 3),
                self._first_within(rest, self.limits.tokens // 6),
            )
            shortest = rest[small[1] - 2 : small[1]]

            if (
                small[1] - small[0] < 2
                or len(bins[index]) > 1
                or sum(self.sizes[row] for row in shortest) > free[index]
            ):
                continue

            row = rest.pop(small[1] - 1)
            bins[index].append(row)
            free[index] -= self.sizes[row]
            self._add_longest(bins[index], free, index, rest, below=self.limits.tokens // 3)

    def _add_longest(
        self,
        bin_: Bin,
        free: list[int],
        index: int,
        rest: Bin,
        above: float = 0,
        below: int | None = None,
    ) -> bool:
        """Move the longest remaining sequence that fits, if it is longer than `above`.

        Return True if one was moved.
        """
        place = self._first_within(rest, free[index] if below is None else min(free[index], below))
        if place == len(rest) or self.sizes[rest[place]] <= above:
            return False
        bin_.append(rest.pop(place))
        free[index] -= self.sizes[bin_[-1]]
        return True

    def _first_within(self, rows: Bin, length: int) -> int:
        """Return the index of the first row that is not longer than `length`."""
        return bisect_left(rows, -length, key=lambda row: -self.sizes[row])

    def _best_fit(self, rows: Bin) -> list[Bin]:
        """Put each sequence into the fullest bin with enough space."""
        bins: list[Bin] = []
        free_bins: list[tuple[int, int]] = []  # (free tokens, bin), ascending
        for row in rows:
            place = bisect_left(free_bins, (self.sizes[row], -1))
            if place == len(free_bins):
                bins.append([])
                free = self.limits.tokens
                index = len(bins) - 1
            else:
                free, index = free_bins.pop(place)
            bins[index].append(row)
            if len(bins[index]) < self.limits.sequences:
                insort(free_bins, (free - self.sizes[row], index))

        return bins

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
