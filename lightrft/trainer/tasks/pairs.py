"""Pairs of answers to one prompt, divided so that both are in one micro-batch."""

from collections.abc import Sequence

import torch

from lightrft.algorithms.reduce import Denominator
from lightrft.config.sections import TrainSection
from lightrft.data.preferences import Sequences, pair_batch, pair_sequences
from lightrft.parallel.collectives import Axis
from lightrft.roles.microbatch import MicroBatchIndices
from lightrft.trainer.tasks.examples import known_denominator, plan_local_rows
from lightrft.types import JudgedBatch, Prompt


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
