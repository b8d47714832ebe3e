"""Local search that moves and swaps single sequences between bins until no bin that ranks wait for can be made cheaper."""

import numpy as np

WORTHWHILE = 0.0001
"""Minimum gain of a round over all micro-batches, as a fraction of the time; the search ends below it."""


class LocalSearch:
    """Bins whose sequences are moved and swapped one by one. Bins b, b + 1, ..., b + ranks - 1 run at the same time."""

    def __init__(
        self,
        works: list[int],
        sizes: list[int],
        bins: list[list[int]],
        *,
        num_ranks: int,
        max_tokens: int,
        max_sequences: int,
    ):
        """Start with `bins`, given the cost and size of every sequence and the limits of a bin."""
        self.num_ranks, self.max_tokens, self.max_sequences, self.count = num_ranks, max_tokens, max_sequences, len(bins)
        # One empty sequence per bin is appended: a swap with it is a move.
        self.works, self.sizes = (np.array(column + [0] * len(bins)) for column in (works, sizes))
        self.home = np.empty(len(self.works), dtype=np.int64)
        for index, bin_ in enumerate(bins):
            self.home[bin_] = index
        self.real = len(works)
        self.home[self.real :] = range(len(bins))

    def bins(self) -> list[list[int]]:
        bins: list[list[int]] = [[] for _ in range(self.count)]
        for row, index in enumerate(self.home[: self.real].tolist()):
            bins[index].append(row)
        return bins

    def round(self) -> bool:
        """Relieve the most expensive bin of every micro-batch once. Return True if the gain exceeds WORTHWHILE."""
        self._sort()
        before = self._spent()[:: self.num_ranks].sum()
        for first in range(0, self.count, self.num_ranks):
            self._relieve(first)
        self._sort()
        return before - self._spent()[:: self.num_ranks].sum() > WORTHWHILE * before

    def _spent(self) -> np.ndarray:
        spent = np.zeros(self.count, dtype=np.int64)
        np.add.at(spent, self.home, self.works)
        return spent

    def _sort(self) -> None:
        """Sort the bins, most expensive first, so that similar bins run at the same time."""
        place = np.empty(self.count, dtype=np.int64)
        place[np.argsort(-self._spent(), kind="stable")] = np.arange(self.count)
        self.home = place[self.home]

    def _relieve(self, first: int) -> None:
        """Move or swap one sequence out of bin `first`, the most expensive of its micro-batch, to a bin that can absorb it."""
        home, works, spent = self.home, self.works, self._spent()
        used = np.bincount(home, weights=self.sizes, minlength=self.count)
        num_sequences = np.bincount(home[: self.real], minlength=self.count)
        same_micro_batch = (home >= first) & (home < first + self.num_ranks)
        ceiling = np.where(same_micro_batch, spent[first] - 1, spent[home - home % self.num_ranks])
        members = np.flatnonzero(home[: self.real] == first)[:, None]
        gain, size_change = works[members] - works, self.sizes[members] - self.sizes
        allowed = (gain > 0) & (gain <= ceiling - spent[home])
        allowed &= (size_change <= self.max_tokens - used[home]) & (size_change >= used[first] - self.max_tokens)
        allowed[:, self.real :] &= num_sequences[home[self.real :]] < self.max_sequences
        if allowed.any():
            after = np.maximum(spent[first] - gain, np.where(same_micro_batch, spent[home] + gain, 0))
            row, partner = np.unravel_index(np.where(allowed, after, np.iinfo(np.int64).max).argmin(), allowed.shape)
            row = members[row, 0]
            home[row] = home[partner]
            if partner < self.real:
                home[partner] = first
