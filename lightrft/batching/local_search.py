"""Moving and swapping single sequences between bins, until no rank can be relieved any more."""

import numpy as np

WORTHWHILE = 0.0001
"""Moving and swapping ends when a round over all micro-batches gains less than this part of the time."""


class LocalSearch:
    """Bins whose sequences are moved and swapped one by one. Bins b, b + 1, ... b + ranks - 1 run at the same time."""

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
        """Cost and length of every sequence; which are in which bin; what a bin may hold."""
        self.num_ranks, self.max_tokens, self.max_sequences, self.count = num_ranks, max_tokens, max_sequences, len(bins)
        # After the sequences comes one of no size for every bin: to swap with it is to move.
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
        """Relieve the dearest bin of every micro-batch once; whether that was worth the while."""
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
        """Dearest first, so that similar bins run at the same time."""
        place = np.empty(self.count, dtype=np.int64)
        place[np.argsort(-self._spent(), kind="stable")] = np.arange(self.count)
        self.home = place[self.home]

    def _relieve(self, first: int) -> None:
        """Move or swap one sequence out of bin `first`, the dearest of its micro-batch, to where nobody waits for it."""
        home, works, spent = self.home, self.works, self._spent()
        used = np.bincount(home, weights=self.sizes, minlength=self.count)
        held = np.bincount(home[: self.real], minlength=self.count)
        same_micro_batch = (home >= first) & (home < first + self.num_ranks)
        ceiling = np.where(same_micro_batch, spent[first] - 1, spent[home - home % self.num_ranks])
        members = np.flatnonzero(home[: self.real] == first)[:, None]
        gain, taken = works[members] - works, self.sizes[members] - self.sizes
        allowed = (gain > 0) & (gain <= ceiling - spent[home])
        allowed &= (taken <= self.max_tokens - used[home]) & (taken >= used[first] - self.max_tokens)
        allowed[:, self.real :] &= held[home[self.real :]] < self.max_sequences
        if allowed.any():
            after = np.maximum(spent[first] - gain, np.where(same_micro_batch, spent[home] + gain, 0))
            row, partner = np.unravel_index(np.where(allowed, after, np.iinfo(np.int64).max).argmin(), allowed.shape)
            row = members[row, 0]
            home[row] = home[partner]
            if partner < self.real:
                home[partner] = first
