"""Order of the rows of several data sets, and shares of the ranks."""

from collections.abc import Sequence
from itertools import accumulate
from math import ceil

import torch

from lightrft.config.errors import DataError
from lightrft.core.order import Order

DRAWS_AT_ONCE = 4096
"""Number of draws that a Blend makes at once."""


def check_batch(num_rows: int, batch_size: int) -> None:
    """Raise DataError for fewer rows than a batch: it would contain some of them twice."""
    if num_rows < batch_size:
        raise DataError(
            f"{num_rows} rows of data do not fill one batch of {batch_size}: add rows, or"
            " choose a smaller --rollout_batch_size (train_ppo) or --train_batch_size (other"
            " commands)"
        )


def draws_of_epoch(sizes: Sequence[int], probabilities: Sequence[float]) -> int:
    """Return the number of draws after which every row has been drawn at least once on average.

    That is max n_i / p_i.
    """
    return ceil(
        max(size / probability for size, probability in zip(sizes, probabilities, strict=True))
        - 1e-9
    )


class Blend:
    """Endless sequence of rows from several data sets.

    Row numbers continue from one set to the next. Each draw is from data set i with probability
    p_i, independently of the others, and takes the next row in the order of that data set. The
    draws are a function of the seed, made in blocks, so a position needs no history but the counts
    of the blocks before it.
    """

    def __init__(self, orders: Sequence[Order], probabilities: Sequence[float], seed: int):
        """Set up the sequence. The probabilities are divided by the sum."""
        self.orders = orders
        self.seed = seed
        self.probabilities = torch.tensor(probabilities, dtype=torch.float64) / sum(probabilities)
        sizes = [order.num_rows for order in orders]
        self.num_rows = draws_of_epoch(sizes, self.probabilities.tolist())
        """Number of draws in an epoch."""
        self._offsets = [0, *accumulate(sizes)]
        self._counts = [torch.zeros(len(orders), dtype=torch.int64)]
        """Number of draws from each data set before each block."""

    def rows(self, first: int, count: int) -> list[int]:
        """Return `count` (at least 1) rows from position `first` on.

        Positions are counted from 0 over all epochs.
        """
        block, before = divmod(first, DRAWS_AT_ONCE)
        last = (first + count - 1) // DRAWS_AT_ONCE
        line = torch.cat([self._block(number) for number in range(block, last + 1)])
        # A data set continues where its draws before this position ended.
        drawn = self._counts_before(block) + torch.bincount(
            line[:before], minlength=len(self.orders)
        )

        line = line[before : before + count]
        rows = torch.empty_like(line)
        for source, order in enumerate(self.orders):
            indices = (line == source).nonzero()[:, 0]
            if len(indices):
                source_rows = torch.tensor(order.rows(int(drawn[source]), len(indices)))
                rows[indices] = source_rows + self._offsets[source]

        return rows.tolist()

    def _block(self, number: int) -> torch.Tensor:
        """Return the data set of each draw of a block, [DRAWS_AT_ONCE] int64."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + number) % 2**63)
        return torch.multinomial(
            self.probabilities, DRAWS_AT_ONCE, replacement=True, generator=generator
        )

    def _counts_before(self, block: int) -> torch.Tensor:
        while len(self._counts) <= block:
            drawn = torch.bincount(self._block(len(self._counts) - 1), minlength=len(self.orders))
            self._counts.append(self._counts[-1] + drawn)
        return self._counts[block]


def share_of(rank: int, size: int, count: int) -> range:
    """Return the consecutive share of `count` items that belongs to `rank` of `size`.

    Sizes of shares differ by at most one.
    """
    return range(rank * count // size, (rank + 1) * count // size)
