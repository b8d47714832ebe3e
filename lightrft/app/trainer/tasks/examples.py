"""Divide an optimizer step's examples, known to all ranks, into ranks and micro-batches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrft.config.sections import TrainSection
from lightrft.core.batch import Rows
from lightrft.core.losses import Denominator
from lightrft.core.samples import Prompt
from lightrft.data.prompts import size_of_row
from lightrft.models.parallel.collectives import Axis
from lightrft.strategy.batching.planner import plan


def plan_local_rows(
    examples: Sequence[Prompt], axis: Axis, train: TrainSection, *, max_tokens: int
) -> tuple[list[int], Rows]:
    """Plan examples, prompts with their answers, over all ranks.

    Return this rank's examples as indices of `examples`, and the micro-batches: [m] has the
    positions of micro-batch m among this rank's examples.
    """
    # All examples are one optimizer step, so the plan has one minibatch.
    schedule = plan(
        list(map(size_of_row, examples)),
        num_ranks=axis.size,
        minibatch_size=len(examples),
        max_tokens=max_tokens,
        max_sequences=train.micro_train_batch_size,
        batching=train.batching,
    )
    return schedule.rows(axis.rank), schedule.local(axis.rank)[0]


def known_denominator(tokens: int, sequences: int, device: torch.device) -> Denominator:
    """Return a denominator of counts that every rank knows."""
    counts: Tensor = torch.tensor([tokens, sequences], dtype=torch.float32).to(device)
    return Denominator(*counts)
