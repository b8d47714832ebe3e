"""Pairs in flat batches: chosen and rejected answers alternate in a micro-batch."""

import torch
from torch import Tensor

from lightrft.core.losses import Report, Weighted


def split_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split [2P, ...] into the values of chosen and of rejected sequences, [P, ...] each.

    An empty micro-batch has a single sequence and therefore no pair. Its values stay part of the
    graph.
    """
    count = len(values) // 2
    return values[0 : 2 * count : 2], values[1 : 2 * count : 2]


def pair_report(chosen: Tensor, rejected: Tensor, right: Tensor) -> Report:
    """Report both rewards, the difference, and whether the judgement is predicted; [P] each."""
    values = {"reward_chosen": chosen, "reward_rejected": rejected}
    values |= {"accuracy": right, "margin": chosen - rejected}
    return {
        f"train/{name}": Weighted(value.detach().float(), torch.ones_like(chosen))
        for name, value in values.items()
    }
