"""Pairs of answers to one prompt; both answers are always in one micro-batch."""

from collections.abc import Sequence

import torch

from lightrft.app.trainer.tasks.examples import known_denominator, plan_local_rows
from lightrft.config.sections import TrainSection
from lightrft.core.batch import JudgedBatch, Rows
from lightrft.core.losses import Denominator
from lightrft.core.samples import Expand, Prompt
from lightrft.data.preferences import CHOSEN, pair_batch
from lightrft.models.parallel.collectives import Axis


def local_pairs(
    pairs: Sequence[Prompt],
    axis: Axis,
    train: TrainSection,
    *,
    max_tokens: int,
    expand: Expand | None,
) -> tuple[JudgedBatch, Rows, list[int]]:
    """Return this rank's share of the pairs: a batch, micro-batches, and indices of the pairs.

    Both sequences of a pair are in one micro-batch, so the loss does not depend on the division.
    `expand` expands prompts with media.
    """
    # A plan of pairs becomes one of answers: the answers of pair i are rows 2 * i and 2 * i + 1.
    local_rows, micro_batches = plan_local_rows(pairs, axis, train, max_tokens=max_tokens)
    batch = pair_batch([pairs[row] for row in local_rows], local_rows, expand)
    rows = [[2 * pair + side for pair in members for side in (0, 1)] for members in micro_batches]
    return batch, rows, local_rows


def pair_denominator(pairs: Sequence[Prompt], device: torch.device) -> Denominator:
    """Count the pairs, and the learned tokens of chosen answers, as a denominator.

    All ranks know both without a collective.
    """
    learned = sum(sum(pair.columns[CHOSEN].learned) for pair in pairs)
    return known_denominator(learned, len(pairs), device)
