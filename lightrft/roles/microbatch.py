"""The one runner of micro-batches: training and inference of every role go through it."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from lightrft.types import Batch, token_index

B = TypeVar("B", bound=Batch)
Rows = list[list[int]]
"""[m]: the sequences of micro-batch m, as positions in the batch."""


def micro_batches(batch: B, rows: Rows, device: torch.device) -> Iterator[B]:
    """The micro-batches on the device. An empty one becomes a single unlearned token, so that ranks stay in step."""
    for members in rows:
        yield (batch.select(members) if members else _filler(batch)).to(device)


def infer(forward: Callable[[B], Tensor], batch: B, rows: Rows, device: torch.device) -> Tensor:
    """`forward` over all micro-batches without gradients, one value per token, in the batch's order: [T] on the host."""
    result = torch.zeros(batch.num_tokens)
    with torch.no_grad():
        for members, micro_batch in zip(rows, micro_batches(batch, rows, device), strict=True):
            values = forward(micro_batch)
            if members:
                result[token_index(batch.offsets, torch.tensor(members))] = values.cpu()
    return result


def _filler(batch: B) -> B:
    zeros = {name: value.new_zeros(1) for name, value in (batch.columns("token") | batch.columns("sequence")).items()}
    return type(batch)(**zeros | {"lengths": torch.ones(1, dtype=torch.int64)})
