"""Assign rows of data to data ranks, in an order that a resumed run continues."""

from collections.abc import Collection, Iterator, Sized
from dataclasses import KW_ONLY, InitVar, dataclass

import torch
from torch.utils.data import Sampler

from lightrft.data.loader import share_of
from lightrft.models.parallel.collectives import Axis


@dataclass(eq=False)
class ResumableBatchSampler(Sampler[list[int]]):
    """Sample batches of row indices for one data rank.

    The order of an epoch depends on seed and epoch only. A global batch is the next `batch_size x
    data ranks` rows, and each rank takes a contiguous part, so a resumed run reads the rest of the
    epoch even on another number of ranks. Every iteration is the next epoch, reshuffled; calling
    set_epoch is not necessary.
    """

    dataset: InitVar[Sized]
    batch_size: int
    axis: Axis
    _: KW_ONLY
    shuffle: bool
    drop_last: bool
    seed: int
    consumed_samples: InitVar[int]
    row_order: Collection[int] | None = None
    """Order of the rows, iterated once for each epoch, also for epochs that a resumed run has
    already done; None for the order by the seed."""

    def __post_init__(self, dataset: Sized, consumed_samples: int) -> None:
        self.rows = len(dataset if self.row_order is None else self.row_order)
        self.global_batch = self.batch_size * self.axis.size

        whole = self.rows // self.global_batch * self.global_batch
        per_epoch = whole if self.drop_last else self.rows
        if not per_epoch:
            raise ValueError(
                f"{self.rows} rows do not fill one batch of {self.batch_size} rows on each of"
                f" {self.axis.size} data ranks: use a smaller batch size"
            )

        self.epoch, self.start = divmod(consumed_samples, per_epoch)
        # An order may draw anew at each iteration, so epochs that are done are drawn again.
        for _ in range(self.epoch if self.row_order is not None else 0):
            list(self.row_order)

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch; it is equal on all ranks."""
        return (
            self.rows // self.global_batch if self.drop_last else -(-self.rows // self.global_batch)
        )

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the next epoch, or the rest of a resumed one.

        Without drop_last the last batch may be empty on some ranks.
        """
        order = self._order(self.epoch)
        position = self.start
        # The next call is the next epoch, even if this one is left in the middle.
        self.epoch = self.epoch + 1
        self.start = 0
        while position + (self.global_batch if self.drop_last else 1) <= self.rows:
            batch = order[position : position + self.global_batch]
            yield [batch[index] for index in share_of(self.axis.rank, self.axis.size, len(batch))]
            position += self.global_batch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one.

        The epoch where a run resumes is not started again; `rows` keep the order that they have.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self.start = 0

    def _order(self, epoch: int) -> list[int]:
        if self.row_order is not None:
            return list(self.row_order)
        if not self.shuffle:
            return list(range(self.rows))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.rows, generator=generator).tolist()
