"""Sequences into bins of equal cost: what the packed plan does for one optimizer step.

Several ways are tried and the cheapest is kept. The ranks wait for each other at every micro-batch, so the time of a plan
is the sum, over micro-batches, of the dearest bin among the ranks.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from lightrft.batching.local_search import LocalSearch

ATTENTION_SCALE = 6 * 4096
"""Tokens at which a sequence's attention costs as much as its matrix products: six times the hidden size."""

GOOD_ENOUGH = 1.002
"""A plan within two thousandths of perfect balance is taken as it is."""

FEW = 1024
"""Up to so many sequences single rows are moved and swapped afterwards: balance is hard only where sequences are few."""

Bin = list[int]


def work(length: int) -> int:
    """Cost of one sequence, exact: its matrix products grow with its length, its attention with the square."""
    return length * ATTENTION_SCALE + length * length


@dataclass(frozen=True, slots=True)
class Limits:
    """What one micro-batch may hold."""

    tokens: int
    sequences: int


def pack(sizes: list[int], works: list[int], num_ranks: int, limits: Limits) -> list[Bin]:
    """Bins of what has these numbers of tokens and these costs, the dearest first, as many as a multiple of the ranks."""
    order = np.argsort(-np.array(sizes), kind="stable").tolist()
    packer = Packer([sizes[row] for row in order], [works[row] for row in order], num_ranks, limits)
    return [[order[place] for place in bin_] for bin_ in packer.best()]


class Packer:
    """Ways to fill bins. Sequences are named by their place in `sizes`, which are their lengths, longest first."""

    def __init__(self, sizes: list[int], works: list[int], num_ranks: int, limits: Limits):
        self.sizes, self.works, self.num_ranks, self.limits = sizes, works, num_ranks, limits

    def best(self) -> list[Bin]:
        """Return the cheapest of four fillings; where sequences are few a local search improves it."""
        few = len(self.sizes) <= FEW
        enough = sum(self.works) / self.num_ranks * (1 if few else GOOD_ENOUGH)
        best: list[Bin] = []
        for way in (self.even, self.staggered, self.roomy, self.tight):
            bins = self._dearest_first(way(list(range(len(self.sizes)))))
            if not best or self._time(bins) < self._time(best):
                best = bins
            if self._time(best) <= enough:
                return best
        return self._improved(best) if few else best

    def even(self, rows: Bin) -> list[Bin]:
        """All bins of nearly equal cost: best where no sequence is dearer than an average bin."""
        return self._fill(rows, self.num_ranks * self._fewest(rows), grow=True)[0]

    def roomy(self, rows: Bin) -> list[Bin]:
        """The same with one bin more per rank: where they hardly fit, long ones need not share a bin."""
        return self._fill(rows, self.num_ranks * (self._fewest(rows) + 1), grow=True)[0]

    def staggered(self, rows: Bin) -> list[Bin]:
        """While a sequence is dearer than an average bin, one bin per rank filled up to its cost; then even ones."""
        bins, left = [], sum(self.works)
        while rows and self.works[rows[0]] * self.num_ranks * self._fewest(rows) > left:
            full, rows = self._fill(rows, self.num_ranks, max_work=self.works[rows[0]])
            left -= sum(self._work(bin_) for bin_ in full)
            bins += full
        return bins + self.even(rows)

    def tight(self, rows: Bin) -> list[Bin]:
        """As few bins as can be, by modified first fit decreasing (Johnson and Garey, Journal of Complexity 1, 1985).

        A sequence longer than half a bin gets its own. Into it goes one longer than a third, or two longer than a sixth,
        or what else fits; what is left then goes to bins without such a long one.
        """
        sizes, tokens = self.sizes, self.limits.tokens
        bins = [[row] for row in rows if 2 * sizes[row] > tokens]
        room = [tokens - sizes[row] for (row,) in bins]
        rest = rows[len(bins) :]
        if self.limits.sequences > 1:
            for index, bin_ in enumerate(bins):  # the least room first
                self._add_longest(bin_, room, index, rest, above=tokens / 3)
            if self.limits.sequences > 2:
                self._add_pairs(bins, room, rest)
            for index, bin_ in enumerate(bins):
                while len(bin_) < self.limits.sequences and self._add_longest(bin_, room, index, rest):
                    pass
        bins += self._best_fit(rest)
        return bins + [[] for _ in range(-len(bins) % self.num_ranks)]

    def _add_pairs(self, bins: list[Bin], room: list[int], rest: Bin) -> None:
        """The shortest and the longest that then fits, of those between a sixth and a third; the roomiest bins first."""
        for index in reversed(range(len(bins))):
            small = self._first_within(rest, self.limits.tokens // 3), self._first_within(rest, self.limits.tokens // 6)
            shortest = rest[small[1] - 2 : small[1]]
            if small[1] - small[0] < 2 or len(bins[index]) > 1 or sum(self.sizes[row] for row in shortest) > room[index]:
                continue
            row = rest.pop(small[1] - 1)
            bins[index].append(row)
            room[index] -= self.sizes[row]
            self._add_longest(bins[index], room, index, rest, below=self.limits.tokens // 3)

    def _add_longest(self, bin_: Bin, room: list[int], index: int, rest: Bin, above: float = 0, below: int | None = None) -> bool:
        """Move the longest of the rest that fits, if it is longer than `above`."""
        place = self._first_within(rest, room[index] if below is None else min(room[index], below))
        if place == len(rest) or self.sizes[rest[place]] <= above:
            return False
        bin_.append(rest.pop(place))
        room[index] -= self.sizes[bin_[-1]]
        return True

    def _first_within(self, rows: Bin, length: int) -> int:
        """Place of the first of the rows, longest first, that is not longer than `length`."""
        return bisect_left(rows, -length, key=lambda row: -self.sizes[row])

    def _best_fit(self, rows: Bin) -> list[Bin]:
        """Each sequence into the fullest bin that has room."""
        bins: list[Bin] = []
        rooms: list[tuple[int, int]] = []  # (room, bin), ascending
        for row in rows:
            place = bisect_left(rooms, (self.sizes[row], -1))
            if place == len(rooms):
                bins.append([])
                room, index = self.limits.tokens, len(bins) - 1
            else:
                room, index = rooms.pop(place)
            bins[index].append(row)
            if len(bins[index]) < self.limits.sequences:
                insort(rooms, (room - self.sizes[row], index))
        return bins

    def _improved(self, bins: list[Bin]) -> list[Bin]:
        """Return the bins after moving and swapping sequences, each time out of a bin that the others wait for."""
        tokens, sequences = self.limits.tokens, self.limits.sequences
        search = LocalSearch(self.works, self.sizes, bins, num_ranks=self.num_ranks, max_tokens=tokens, max_sequences=sequences)
        while search.round():
            pass
        return self._dearest_first(search.bins())

    def _dearest_first(self, bins: list[Bin]) -> list[Bin]:
        return sorted(bins, key=lambda bin_: (-self._work(bin_), bin_))

    def _time(self, bins: list[Bin]) -> int:
        """Of bins that are sorted dearest first: the ranks wait for the dearest at every micro-batch."""
        return sum(self._work(bin_) for bin_ in bins[:: self.num_ranks])

    def _work(self, bin_: Bin) -> int:
        return sum([self.works[row] for row in bin_])

    def _fewest(self, rows: Bin) -> int:
        """Bins per rank without which the rows cannot fit."""
        by_tokens = -(-sum([self.sizes[row] for row in rows]) // self.limits.tokens)
        by_sequences = -(-len(rows) // self.limits.sequences)
        alone = sum([2 * self.sizes[row] > self.limits.tokens for row in rows])  # no two of them share a bin
        return -(-max(by_tokens, by_sequences, alone) // self.num_ranks)

    def _fill(self, rows: Bin, count: int, *, grow: bool = False, max_work: int | None = None) -> tuple[list[Bin], Bin]:
        """Rows, longest first, each into the cheapest of `count` bins that has room; and the rows that found none.

        With `grow` there is always room: one more bin per rank is opened where it is missing.
        """
        bins: list[Bin] = [[] for _ in range(count)]
        room = [self.limits.tokens] * count
        open_ = [(0, index) for index in range(count)]  # heap: the cheapest first
        parked: list[tuple[int, int, int]] = []  # heap of bins too full for the rows so far: the roomiest first
        rest: Bin = []
        for row in rows:
            size, cost = self.sizes[row], self.works[row]
            while parked and -parked[0][0] >= size:
                heapq.heappush(open_, heapq.heappop(parked)[1:])
            while open_ and room[open_[0][1]] < size:
                spent, index = heapq.heappop(open_)
                heapq.heappush(parked, (-room[index], spent, index))
            if not open_ and grow:
                open_ = [(0, index) for index in range(len(bins), len(bins) + self.num_ranks)]
                bins += [[] for _ in open_]
                room += [self.limits.tokens] * len(open_)
            if not open_ or (max_work is not None and open_[0][0] + cost > max_work):
                rest.append(row)
                continue
            spent, index = open_[0]
            bins[index].append(row)
            room[index] -= size
            if len(bins[index]) < self.limits.sequences:
                heapq.heapreplace(open_, (spent + cost, index))
            else:
                heapq.heappop(open_)
        return bins, rest
