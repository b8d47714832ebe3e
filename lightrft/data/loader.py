"""Which rows come next: a function of the seed and the place, so a resumed run has nothing to catch up."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import torch

from lightrft.data.readers import DataError


@dataclass(frozen=True, slots=True)
class Order:
    """The rows of the data in an endless line: pass after pass, each shuffled anew."""

    num_rows: int
    seed: int

    @staticmethod
    def check(num_rows: int, batch_size: int) -> None:
        """DataError for fewer rows than a batch: it would have some of them twice."""
        if num_rows < batch_size:
            raise DataError(f"{num_rows} rows of data do not fill one batch of {batch_size}")

    def rows(self, first: int, count: int) -> list[int]:
        """The `count`, at least 1, at the places from `first` on, counted from 0 over all passes."""
        passes = range(first // self.num_rows, (first + count - 1) // self.num_rows + 1)
        generators = [torch.Generator().manual_seed(self.seed + number) for number in passes]
        line = torch.cat([torch.randperm(self.num_rows, generator=generator) for generator in generators])
        begin = first % self.num_rows
        return line[begin : begin + count].tolist()


def share_of(rank: int, size: int, count: int) -> range:
    """The consecutive part of `count` things that belongs to `rank` of `size`; parts differ by one at most."""
    return range(rank * count // size, (rank + 1) * count // size)


def fair_share(rank: int, size: int, costs: Sequence[float]) -> range:
    """The consecutive part of things with these costs, all above 0, so that all ranks have about as much to do.

    Of things that cost the same it is share_of().
    """
    sums = list(accumulate(costs))
    owners = [ceil(round(end * size / sums[-1], 9)) - 1 for end in sums]
    return range(sum(owner < rank for owner in owners), sum(owner <= rank for owner in owners))
