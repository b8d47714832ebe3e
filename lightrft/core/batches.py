"""Divide sequences into micro-batches, and run them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightrft.core.batch import Batch, Experience, token_index

Rows = list[list[int]]
"""[m]: the sequences of micro-batch m, as positions in a batch."""


@dataclass(slots=True)
class TrainingPlan:
    """This rank's share of the experience, and the micro-batches of each optimizer step.

    minibatches[k][m] are the rows of micro-batch m of optimizer step k.
    """

    experience: Experience
    minibatches: list[Rows]
    epochs: int = 1
    """How often a step learns from each of them."""

    @property
    def updates(self) -> list[Rows]:
        """Return the micro-batches of all optimizer steps of all epochs."""
        return self.minibatches * self.epochs

    @property
    def microbatches(self) -> Rows:
        """Return the micro-batches of one epoch."""
        return [members for minibatch in self.minibatches for members in minibatch]


def consecutive(lengths: list[int], minibatch_size: int | None, max_tokens: int) -> list[Rows]:
    """Divide sequences, in their order, into optimizer steps and these into micro-batches: [k][m].

    A micro-batch has at most `max_tokens` tokens. `batching/planner.py` balances several ranks.
    """
    size = minibatch_size or max(len(lengths), 1)
    steps = []
    for first, stop in pairwise([*range(0, len(lengths), size), len(lengths)]):
        rows: Rows = []
        room = -1
        for row in range(first, stop):
            room -= lengths[row]
            if room < 0:
                rows.append([])
                room = max_tokens - lengths[row]
            if room < 0:
                raise ValueError(f"a sequence of {lengths[row]} tokens exceeds {max_tokens}")
            rows[-1].append(row)
        steps.append(rows)
    return steps


def micro_batches(batch: Batch, rows: Rows, to_device: Callable[[Batch], Batch]) -> Iterator[Batch]:
    """Yield the micro-batches on the device.

    An empty one becomes a single unlearned token, so that ranks stay in step.
    """
    for members in rows:
        yield to_device(batch.select(members) if members else empty_microbatch(batch))


def infer(
    forward: Callable[[Batch], Tensor],
    batch: Batch,
    rows: Rows,
    to_device: Callable[[Batch], Batch],
) -> Tensor:
    """Run `forward` on all micro-batches without gradients.

    It returns [t, ...] for each; the result is [T, ...] on the host, in the batch's order.
    """
    with torch.no_grad():
        values = [forward(micro_batch) for micro_batch in micro_batches(batch, rows, to_device)]
    result = torch.zeros(batch.num_tokens, *(values[0].shape[1:] if values else ()))
    for members, value in zip(rows, values, strict=True):
        if members:
            result[token_index(batch.offsets, torch.tensor(members))] = value.cpu()
    return result


def empty_microbatch(batch: Batch) -> Batch:
    """Return a batch of one token that is not learned, with the columns of `batch`."""
    tensors = batch.columns("token") | batch.columns("sequence")
    zeros = {name: value.new_zeros(1, *value.shape[1:]) for name, value in tensors.items()}
    absent = {"media": None, "experts": None}
    return batch.with_columns(zeros | absent | {"lengths": batch.lengths.new_ones(1)})
