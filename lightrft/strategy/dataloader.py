"""Which rows each data rank sees, in which order, and where to continue."""

from collections.abc import Collection, Iterator, Sized

import torch
from torch.utils.data import Sampler

from lightrft.data.loader import share_of
from lightrft.parallel.collectives import Axis


class ResumableBatchSampler(Sampler[list[int]]):
    """Batches of row numbers for one data rank.

    The order of an epoch depends on seed and epoch only. Global batch b is the next `batch_size x data ranks` rows of it
    and each rank takes its contiguous part, so a resumed run reads the rest of the epoch even on another number of ranks.
    Every iteration is the next epoch, reshuffled; nobody has to call set_epoch.

    With `rows` the order is theirs: iterated once for each epoch, also for those before the one that a resumed run is in.
    """

    def __init__(self, dataset: Sized, batch_size: int, axis: Axis, *, shuffle: bool, drop_last: bool, seed: int,
                 consumed_samples: int, rows: Collection[int] | None = None):
        self.given = rows
        self.rows = len(dataset if rows is None else rows)
        self.batch_size, self.axis = batch_size, axis
        self.shuffle, self.drop_last, self.seed = shuffle, drop_last, seed
        self.global_batch = batch_size * axis.size
        per_epoch = self.rows // self.global_batch * self.global_batch if drop_last else self.rows
        if not per_epoch:
            raise ValueError(
                f"{self.rows} rows do not fill one batch of {batch_size} rows on each of {axis.size} data ranks: "
                "use a smaller batch size"
            )
        self.epoch, self.start = divmod(consumed_samples, per_epoch)
        for _ in range(self.epoch if rows is not None else 0):
            list(rows)

    def __len__(self) -> int:
        """Batches of a whole epoch, on every rank."""
        return self.rows // self.global_batch if self.drop_last else -(-self.rows // self.global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        """The next epoch; a resumed one begins in its middle. Without drop_last the last batch may be empty on some ranks."""
        order, position = self._order(self.epoch), self.start
        self.epoch, self.start = self.epoch + 1, 0
        while position + (self.global_batch if self.drop_last else 1) <= self.rows:
            batch = order[position : position + self.global_batch]
            yield [batch[place] for place in share_of(self.axis.rank, self.axis.size, len(batch))]
            position += self.global_batch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one. The epoch that a resumed run is in the middle of stays there; given rows come in turn."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def _order(self, epoch: int) -> list[int]:
        if self.given is not None:
            return list(self.given)
        if not self.shuffle:
            return list(range(self.rows))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.rows, generator=generator).tolist()
