"""Division of an optimizer step's examples, which all ranks know, into ranks and micro-batches."""

import torch
from torch import Tensor

from lightrft.algorithms.reduce import Denominator
from lightrft.batching.planner import plan
from lightrft.config.sections import TrainSection
from lightrft.data.preferences import Sequences, pair_batch, pair_sequences
from lightrft.parallel.collectives import Axis
from lightrft.roles.microbatch import MicroBatchIndices
from lightrft.types import JudgedBatch, Prompt


def plan_local_rows(sizes: list[int], axis: Axis, train: TrainSection, *, max_tokens: int) -> tuple[list[int], MicroBatchIndices]:
    """Plan examples of the given sizes in tokens over all ranks.

    Return this rank's examples, as indices of `sizes`, and [m]: those of micro-batch m, as positions among them.
    """
    schedule = plan(
        sizes,
        num_ranks=axis.size,
        minibatch_size=len(sizes),
        max_tokens=max_tokens,
        max_sequences=train.micro_train_batch_size,
        batching=train.batching,
    )
    return schedule.rows(axis.rank), schedule.local(axis.rank)[0]


def local_pairs(
    pairs: Sequence[Prompt], axis: Axis, train: TrainSection, *, max_tokens: int
) -> tuple[JudgedBatch, MicroBatchIndices, list[int]]:
    """Return this rank's share of the pairs as a batch, its micro-batches, and the indices of its pairs.

    Both sequences of a pair are in one micro-batch, so the loss does not depend on the division.
    """
    lengths = list(map(len, pair_sequences(pairs).token_ids))
    sizes = [sum(both) for both in zip(lengths[::2], lengths[1::2], strict=True)]
    local_rows, micro_batches = plan_local_rows(sizes, axis, train, max_tokens=max_tokens)
    batch = pair_batch([pairs[row] for row in local_rows], local_rows)
    return batch, [[2 * pair + place for pair in members for place in (0, 1)] for members in micro_batches], local_rows


def pair_denominator(pairs: Sequence[Prompt], device: torch.device) -> Denominator:
    """Return the number of pairs, and of learned tokens in their chosen answers. All ranks know them without a collective."""
    chosen = Sequences(*(each[::2] for each in pair_sequences(pairs)))
    return known_denominator(sum(map(sum, chosen.learned)), len(pairs), device)


def known_denominator(tokens: int, sequences: int, device: torch.device) -> Denominator:
    """Return a denominator of counts that every rank knows."""
    counts: Tensor = torch.tensor([tokens, sequences], dtype=torch.float32).to(device)
    return Denominator(counts[0], counts[1], length=1)
