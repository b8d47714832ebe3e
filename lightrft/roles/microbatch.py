"""Run micro-batches, for the training and the inference of every role."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from lightrft.batching.prefix_sharing import MIN_SAVING, find_shared_prefixes
from lightrft.types import Batch, token_index

B = TypeVar("B", bound=Batch)
MicroBatchIndices = list[list[int]]
"""[m]: the sequences of micro-batch m, as positions in the batch."""


def micro_batches(batch: B, rows: MicroBatchIndices, device: torch.device) -> Iterator[B]:
    """Yield the micro-batches on the device.

    An empty one becomes a single unlearned token, so that ranks stay in step.
    """
    for members in rows:
        part = batch.select(members) if members else empty_microbatch(batch)
        shared = find_shared_prefixes(
            part.input_ids, part.lengths, part.media, min_saving=MIN_SAVING
        )
        yield replace(part, shared=shared).to(device)


def infer(
    forward: Callable[[B], Tensor], batch: B, rows: MicroBatchIndices, device: torch.device
) -> Tensor:
    """Run `forward` on all micro-batches without gradients.

    It returns [t, ...] for each; the result is [T, ...] on the host, in the batch's order.
    """
    with torch.no_grad():
        values = [forward(micro_batch) for micro_batch in micro_batches(batch, rows, device)]
    result = torch.zeros(batch.num_tokens, *(values[0].shape[1:] if values else ()))
    for members, value in zip(rows, values, strict=True):
        if members:
            result[token_index(batch.offsets, torch.tensor(members))] = value.cpu()
    return result


def empty_microbatch(batch: B) -> B:
    """Return a batch of one token that is not learned, with the columns of `batch`."""
    zeros = {
        name: value.new_zeros(1, *value.shape[1:])
        for name, value in (batch.columns("token") | batch.columns("sequence")).items()
    }
    absent = {"media": None, "experts": None}
    return batch.with_columns(zeros | absent | {"lengths": batch.lengths.new_ones(1)})
