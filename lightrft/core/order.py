"""In which order the rows of the data come, and which rank takes which."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil

import torch


@dataclass(frozen=True, slots=True)
class Order:
    """Endless sequence of the data rows: one pass after another, each newly shuffled.

    It is a function of the seed and the position, so a resumed run has nothing to replay.
    """

    num_rows: int
    seed: int

    def rows(self, first: int, count: int) -> list[int]:
        """Return `count` (at least 1) rows from position `first` on.

        Positions are counted from 0 over all passes.
        """
        passes = range(first // self.num_rows, (first + count - 1) // self.num_rows + 1)
        line = torch.cat([_shuffle(self.num_rows, self.seed + number) for number in passes])
        begin = first % self.num_rows
        return line[begin : begin + count].tolist()


@lru_cache(maxsize=2)
def _shuffle(num_rows: int, seed: int) -> torch.Tensor:
    """Return the rows of a pass in order, [num_rows] int64.

    They are cached, because large data take seconds to shuffle and every batch asks for a pass.
    """
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))


def fair_owners(size: int, costs: Sequence[float]) -> list[int]:
    """Return the rank of each item, so that all ranks have about the same cost.

    Ranks get consecutive items, and the costs are positive.
    """
    sums = list(accumulate(costs))
    return [ceil(round(end * size / sums[-1], 9)) - 1 for end in sums]
