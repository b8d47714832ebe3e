"""Order of the data rows: a function of the seed and the position, so a resumed run has nothing to replay."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import torch

from lightrft.data.readers import DataError


@dataclass(frozen=True, slots=True)
class Order:
    """Endless sequence of the data rows: one pass after another, each newly shuffled."""

    num_rows: int
    seed: int

    @staticmethod
    def check(num_rows: int, batch_size: int) -> None:
        """Raise DataError for fewer rows than a batch, which would contain some of them twice."""
        if num_rows < batch_size:
            raise DataError(f"{num_rows} rows of data do not fill one batch of {batch_size}")

    def rows(self, first: int, count: int) -> list[int]:
        """Return `count` (at least 1) rows from position `first` on, counted from 0 over all passes."""
        passes = range(first // self.num_rows, (first + count - 1) // self.num_rows + 1)
        generators = [torch.Generator().manual_seed(self.seed + number) for number in passes]
        line = torch.cat([torch.randperm(self.num_rows, generator=generator) for generator in generators])
        begin = first % self.num_rows
        return line[begin : begin + count].tolist()


def share_of(rank: int, size: int, count: int) -> range:
    """Return the consecutive part of `count` items that belongs to `rank` of `size`; sizes of parts differ by at most one."""
    return range(rank * count // size, (rank + 1) * count // size)


def fair_share(rank: int, size: int, costs: Sequence[float]) -> range:
    """Return the consecutive part of items with these positive costs that balances the costs of all ranks.

    For equal costs it is share_of().
    """
    sums = list(accumulate(costs))
    owners = [ceil(round(end * size / sums[-1], 9)) - 1 for end in sums]
    return range(sum(owner < rank for owner in owners), sum(owner <= rank for owner in owners))
