"""Move and swap single sequences between bins until the ranks wait no less.

Only bins that other ranks wait for need to become cheaper.
"""

from dataclasses import dataclass

import numpy as np

WORTHWHILE = 0.0001
"""Smallest gain of a round, as a fraction of the time, that makes another round worthwhile."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum numbers of tokens and sequences in one micro-batch."""

    tokens: int
    sequences: int


@dataclass(eq=False)
class LocalSearch:
    """Improves a division into bins by moving and swapping sequences one by one.

    Bins b, b + 1, ..., b + ranks - 1 run at the same time.
    """

    works: np.ndarray
    """Cost of every sequence."""
    sizes: np.ndarray
    """Size of every sequence."""
    bin_of: np.ndarray
    """Bin of every sequence."""
    num_ranks: int
    limits: Limits
    """Limits of a bin."""

    def __post_init__(self) -> None:
        self.count = self.num_ranks * -(-int(self.bin_of.max() + 1) // self.num_ranks)
        self.real = len(self.works)
        # Each bin gets one empty sequence at the end: a swap with it is a move.
        self.works = np.append(self.works, [0] * self.count)
        self.sizes = np.append(self.sizes, [0] * self.count)
        self.bin_of = np.append(self.bin_of, range(self.count))

    def bins(self) -> np.ndarray:
        """Return the bin of every sequence."""
        return self.bin_of[: self.real]

    def round(self) -> bool:
        """Relieve the most expensive bin of every micro-batch once.

        Return True if the gain exceeds WORTHWHILE.
        """
        self._sort()
        before = self._costs()[:: self.num_ranks].sum()
        for first in range(0, self.count, self.num_ranks):
            self._relieve(first)
        self._sort()
        return before - self._costs()[:: self.num_ranks].sum() > WORTHWHILE * before

    def _costs(self) -> np.ndarray:
        costs = np.zeros(self.count, dtype=np.int64)
        np.add.at(costs, self.bin_of, self.works)
        return costs

    def _sort(self) -> None:
        """Sort the bins, most expensive first, so that similar bins run at the same time."""
        ordinal = np.empty(self.count, dtype=np.int64)
        ordinal[np.argsort(-self._costs(), kind="stable")] = np.arange(self.count)
        self.bin_of = ordinal[self.bin_of]

    def _relieve(self, first: int) -> None:
        """Move or swap one sequence out of bin `first`, the most expensive one of a micro-batch.

        It goes to a bin that can absorb it.
        """
        bin_of = self.bin_of
        works = self.works
        costs = self._costs()
        used = np.bincount(bin_of, weights=self.sizes, minlength=self.count)
        num_sequences = np.bincount(bin_of[: self.real], minlength=self.count)
        same_micro_batch = (bin_of >= first) & (bin_of < first + self.num_ranks)
        # No bin may become more expensive than the one that the ranks already wait for.
        ceiling = np.where(
            same_micro_batch, costs[first] - 1, costs[bin_of - bin_of % self.num_ranks]
        )
        members = np.flatnonzero(bin_of[: self.real] == first)[:, None]
        gain = works[members] - works
        size_change = self.sizes[members] - self.sizes
        allowed = (gain > 0) & (gain <= ceiling - costs[bin_of])

        most = self.limits.tokens
        allowed &= (size_change <= most - used[bin_of]) & (size_change >= used[first] - most)
        allowed[:, self.real :] &= num_sequences[bin_of[self.real :]] < self.limits.sequences
        if allowed.any():
            after = np.maximum(
                costs[first] - gain, np.where(same_micro_batch, costs[bin_of] + gain, 0)
            )
            row, partner = np.unravel_index(
                np.where(allowed, after, np.iinfo(np.int64).max).argmin(), allowed.shape
            )
            row = members[row, 0]
            bin_of[row] = bin_of[partner]
            if partner < self.real:
                bin_of[partner] = first
