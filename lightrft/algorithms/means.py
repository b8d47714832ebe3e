"""Ways to take the mean of the loss over an optimizer step (--loss_agg_mode).

The means over tokens and over sequences are in core/losses.py.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from lightrft.core.batch import Batch
from lightrft.core.losses import Denominator, Mean, sequence_mean, sequence_sums, token_mean

BRANCH_WEIGHTS = "branch_weights"
"""Column [N] float32: weight of each conversation of an episode, with --branch_weight episode."""


class PromptTokens(NamedTuple):
    """Learned tokens of the optimizer step by prompt, over all ranks."""

    groups: Tensor
    """Groups with a learned token, ascending: [G] int64."""
    tokens: Tensor
    """Number of learned tokens of each: [G] float32."""

    @classmethod
    def of(cls, counts: dict[int, float]) -> Self:
        """Take the number of learned tokens by group; groups without any are left out."""
        present = {group: count for group, count in sorted(counts.items()) if count}
        return cls(
            torch.tensor(list(present), dtype=torch.int64),
            torch.tensor(list(present.values()), dtype=torch.float32),
        )

    def to(self, device: torch.device) -> Self:
        """Return a copy on the device."""
        return type(self)(self.groups.to(device), self.tokens.to(device))


class MeanCounts(NamedTuple):
    """Holds what only some means divide by: the field `mean_counts` of Denominator."""

    length: int
    """Constant of seq-mean-token-sum-norm: the longest response in tokens."""
    prompts: PromptTokens | None = None
    """Only for prompt-mean."""


def mean_of_sums(values: Tensor, batch: Batch, denominator: Denominator) -> Tensor:
    """Sum per sequence, mean over sequences."""
    loss_values = torch.where(batch.loss_mask, values, 0.0)
    return loss_values.sum() / denominator.sequences.clamp(min=1)


def mean_of_sums_by_length(values: Tensor, batch: Batch, denominator: Denominator) -> Tensor:
    """Divide mean_of_sums() by a constant length (Dr. GRPO, arXiv 2503.20783)."""
    return mean_of_sums(values, batch, denominator) / denominator.mean_counts.length


def prompt_mean(values: Tensor, batch: Batch, denominator: Denominator) -> Tensor:
    """Mean over all tokens of a prompt's responses, then over prompts (ScaleRL, arXiv 2510.13786).

    Raises ValueError if the denominator does not have the tokens of each prompt.
    """
    if denominator.mean_counts is None or denominator.mean_counts.prompts is None:
        raise ValueError("prompt-mean needs the tokens of each prompt: use Role.with_prompts()")

    loss_values = torch.where(batch.loss_mask, values, 0.0)
    groups, tokens = denominator.mean_counts.prompts
    if not len(groups):
        return loss_values.sum()
    indices = torch.searchsorted(groups, batch.groups).clamp(max=len(groups) - 1)
    return (sequence_sums(loss_values, batch) / tokens[indices]).sum() / len(groups)


means: dict[str, Mean] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": sequence_mean,
    "seq-mean-token-sum": mean_of_sums,
    "seq-mean-token-sum-norm": mean_of_sums_by_length,
    "prompt-mean": prompt_mean,
}
"""--loss_agg_mode -> the function."""


def weighted_by_branch(mean: Mean) -> Mean:
    """Return a mean of values times the weights of their sequences."""

    def weighted(values: Tensor, batch: Batch, denominator: Denominator) -> Tensor:
        weights = getattr(batch, BRANCH_WEIGHTS)
        return mean(values * weights[batch.sequence_ids], batch, denominator)

    return weighted
