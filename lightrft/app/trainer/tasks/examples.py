"""Divide an optimizer step's examples, known to all ranks, into ranks and micro-batches."""

import torch
from torch import Tensor

from lightrft.config.sections import TrainSection
from lightrft.core.batch import Rows
from lightrft.core.losses import Denominator
from lightrft.models.parallel.collectives import Axis
from lightrft.strategy.batching.planner import plan


def plan_local_rows(
    sizes: list[int], axis: Axis, train: TrainSection, *, max_tokens: int
) -> tuple[list[int], Rows]:
    """Plan examples of the given sizes, in tokens, over all ranks.

    Return this rank's examples as indices of `sizes`, and the micro-batches: [m] has the positions
    of micro-batch m among these examples.
    """
    # All examples are one optimizer step, so the plan has one minibatch.
    schedule = plan(
        sizes,
        num_ranks=axis.size,
        minibatch_size=len(sizes),
        max_tokens=max_tokens,
        max_sequences=train.micro_train_batch_size,
        batching=train.batching,
    )
    return schedule.rows(axis.rank), schedule.local(axis.rank)[0]


def known_denominator(tokens: int, sequences: int, device: torch.device) -> Denominator:
    """Return a denominator of counts that every rank knows."""
    counts: Tensor = torch.tensor([tokens, sequences], dtype=torch.float32).to(device)
    return Denominator(*counts)
