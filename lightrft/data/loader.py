"""Which rows each step takes: a function of the seed and the step, so a resumed run has nothing to catch up."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Shuffles `num_rows` anew for every pass and cuts them into batches; rows that do not fill one wait for the next pass."""

    num_rows: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_rows < self.batch_size:
            raise ValueError(f"{self.num_rows} rows of data do not fill one batch of {self.batch_size}")

    @property
    def steps_per_pass(self) -> int:
        return self.num_rows // self.batch_size

    def rows(self, step: int) -> list[int]:
        """The rows of step `step`, counted from 0 over all passes."""
        epoch, place = divmod(step, self.steps_per_pass)
        shuffled = torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(self.seed + epoch))
        return shuffled[place * self.batch_size : (place + 1) * self.batch_size].tolist()


def share_of(rank: int, size: int, count: int) -> range:
    """The consecutive part of `count` things that belongs to `rank` of `size`; parts differ by one at most."""
    return range(rank * count // size, (rank + 1) * count // size)
