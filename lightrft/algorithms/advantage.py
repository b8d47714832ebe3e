"""Advantage estimators: how much better a sample was than its group.

Each takes the rewards and groups of **all** samples of a step, of all ranks, and gives one advantage per sample, which
its tokens share.
"""

import torch
from torch import Tensor

from lightrft.registry import Registry

estimators = Registry("advantage estimator", flag="--advantage_estimator")


@estimators.register("grpo", "group_norm")
def grpo(rewards: Tensor, groups: Tensor, *, eps: float = 1e-4) -> Tensor:
    """A_i = (R_i - mean_g R) / (std_g R + eps), std with Bessel's correction. [N], [N] -> [N].

    A group of equal rewards, or of one sample, has advantage 0. DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    mean, std = group_mean_std(rewards, groups)
    return ((rewards - mean) / (std + eps)).to(rewards.dtype)


def group_mean_std(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of each value's group, as seen by that value. [N], [N] -> [N], [N] float64.

    In float32 the mean of equal values need not be that value, and the difference would pass for a signal.
    """
    values = values.double()
    _, member, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    mean = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add_(0, member, values) / counts
    deviation = values - mean[member]
    squares = torch.zeros_like(mean).index_add_(0, member, deviation.square())
    std = (squares / (counts - 1).clamp(min=1)).sqrt()
    return mean[member], std[member]
