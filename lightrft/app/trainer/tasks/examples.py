"""Divide an optimizer step's examples, known to all ranks, into ranks and micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightrft.app.run.run import Run
from lightrft.core.batch import Rows
from lightrft.core.losses import Denominator
from lightrft.core.samples import Prompt
from lightrft.data.prompts import size_of_row
from lightrft.strategy.batching.planner import plan


def local_batch(
    run: Run, make_batch: Callable[..., Any], examples: Sequence[Prompt], *, max_tokens: int
) -> tuple[Any, Rows, list[int]]:
    """Plan examples, prompts with their answers, over all ranks; make a batch of this rank's share.

    Return the batch, the micro-batches, where [m] has the positions of micro-batch m among this
    rank's examples, and these examples as indices of `examples`. `make_batch` is a function such as
    judged_batch().
    """
    axis = run.strategy.mesh.data
    # All examples are one optimizer step, so the plan has one minibatch.
    schedule = plan(
        list(map(size_of_row, examples)),
        num_ranks=axis.size,
        minibatch_size=len(examples),
        max_tokens=max_tokens,
        max_sequences=run.config.train.micro_train_batch_size,
        batching=run.config.train.batching,
    )
    local = schedule.rows(axis.rank)
    batch = make_batch([examples[row] for row in local], local, run.expand)
    return batch, schedule.local(axis.rank)[0], local


def known_denominator(tokens: int, sequences: int, device: torch.device) -> Denominator:
    """Return a denominator of counts that every rank knows."""
    counts: Tensor = torch.tensor([tokens, sequences], dtype=torch.float32).to(device)
    return Denominator(*counts)
