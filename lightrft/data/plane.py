"""Moving samples between ranks: numbers are known to everyone, tensors go to their new owner, once."""

from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from lightrft.parallel.collectives import Axis
from lightrft.types import Batch

B = TypeVar("B", bound=Batch)


def share(axis: Axis, values: Tensor) -> Tensor:
    """The [n] values of every rank, end to end in rank order: [N]."""
    return torch.cat(axis.gather(values))


def move(axis: Axis, batch: B, owners: list[list[int]]) -> B:
    """Send every sequence to the rank whose list names its row; returns this rank's, in the order of its list.

    `owners[r]` holds rows of the whole batch, each row in one list.
    """
    place = {row: index for index, row in enumerate(batch.rows.tolist())}
    parts = [batch.select([place[row] for row in rows if row in place]) for rows in owners]
    received = replace(batch, **{name: _exchange(axis, parts, name) for name in _present(batch)})
    arrived = {row: index for index, row in enumerate(received.rows.tolist())}
    return received.select([arrived[row] for row in owners[axis.rank]])


def _present(batch: Batch) -> list[str]:
    return [f.name for f in fields(batch) if getattr(batch, f.name) is not None]


def _exchange(axis: Axis, parts: list[Batch], name: str) -> Tensor:
    return torch.cat(axis.exchange([getattr(part, name) for part in parts]))
