"""Pairs of answers to one prompt; both answers are always in one micro-batch."""

from collections.abc import Sequence

import torch

from lightrft.app.run.run import Run
from lightrft.app.trainer.tasks.examples import known_denominator, local_batch
from lightrft.core.batch import JudgedBatch, Rows
from lightrft.core.losses import Denominator
from lightrft.core.samples import Prompt
from lightrft.data.preferences import CHOSEN, pair_batch


def local_pairs(
    run: Run, pairs: Sequence[Prompt], *, max_tokens: int
) -> tuple[JudgedBatch, Rows, list[int]]:
    """Return this rank's share of the pairs: a batch, micro-batches, and indices of the pairs.

    Both sequences of a pair are in one micro-batch, so the loss does not depend on the division.
    """
    batch, micro_batches, local = local_batch(run, pair_batch, pairs, max_tokens=max_tokens)
    # A plan of pairs becomes one of answers: the answers of pair i are rows 2 * i and 2 * i + 1.
    rows = [[2 * pair + side for pair in members for side in (0, 1)] for members in micro_batches]
    return batch, rows, local


def pair_denominator(pairs: Sequence[Prompt], device: torch.device) -> Denominator:
    """Count the pairs, and the learned tokens of chosen answers, as a denominator.

    All ranks know both without a collective.
    """
    learned = sum(sum(pair.columns[CHOSEN].learned) for pair in pairs)
    return known_denominator(learned, len(pairs), device)
