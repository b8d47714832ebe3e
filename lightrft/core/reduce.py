"""Reduce one value per token to the loss: the only module that computes a scalar.

The denominator counts the whole optimizer step, over all ranks and micro-batches, so the sum of all
shares is the same for every way of splitting the step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from lightrft.core.batch import Batch

Sum = Callable[[Tensor], Tensor]
"""Function that returns the sum of a tensor over all ranks."""


@dataclass(frozen=True, slots=True)
class LocalGradients:
    """Gradients of an objective that are known before all log-probs of the batch are."""

    compute: Callable[[Tensor, Tensor | None], tuple[Tensor | None, Tensor | None]]
    """(log-probs [T], entropy [T] or None) -> the gradients of the objective by both.

    The gradients of some tokens are right as soon as these tokens have their log-probs.
    """
    num_sequences: int
    """Number of consecutive sequences whose tokens determine each other's gradients.

    0: a token alone determines its own, 1: a sequence, 2: a pair.
    """


class Weighted(NamedTuple):
    """Values to report, with a weight for each in the mean; both have the same shape."""

    values: Tensor
    weight: Tensor


Report = dict[str, Tensor | Weighted]
"""Metric name -> values to average: [T] over learned tokens, or any shape with weights of its own.

For names that end in `_max` or `_min` the extreme is reported.
"""


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


@dataclass(frozen=True, slots=True)
class Denominator:
    """Counts of the optimizer step, over all ranks."""

    tokens: Tensor
    """Number of learned tokens, [] float32."""
    sequences: Tensor
    """Number of sequences with at least one learned token, [] float32."""
    length: int
    """Constant of seq-mean-token-sum-norm: the longest response in tokens."""
    prompts: PromptTokens | None = None
    """Only for prompt-mean."""
    updates_before: int = 0
    """Number of optimizer steps that have used the samples before this one."""


def share_of_mean(values: Tensor, batch: Batch, mode: str, denominator: Denominator) -> Tensor:
    """Return this micro-batch's share of the global mean of `values` [T] over learned tokens: [].

    token-mean: sum over tokens / all tokens (DAPO, arXiv 2503.14476).
    seq-mean-token-mean: mean per sequence, then over sequences (GRPO, arXiv 2402.03300).
    seq-mean-token-sum: sum per sequence, mean over sequences.
    seq-mean-token-sum-norm: the same divided by a constant length (Dr. GRPO, arXiv 2503.20783).
    prompt-mean: mean over all tokens of a prompt's responses, then over prompts (ScaleRL, arXiv
    2510.13786).
    The result is float32.
    """
    loss_values = torch.where(batch.loss_mask, values, 0.0)
    if mode == "token-mean":
        return loss_values.sum() / denominator.tokens.clamp(min=1)
    if mode == "seq-mean-token-mean":
        return sequence_means(values, batch).sum() / denominator.sequences.clamp(min=1)

    if mode == "prompt-mean":
        if denominator.prompts is None:
            raise ValueError(
                "prompt-mean needs the tokens of each prompt: denominator(by_prompt=True)"
            )
        groups, tokens = denominator.prompts
        if not len(groups):
            return loss_values.sum()
        places = torch.searchsorted(groups, batch.groups).clamp(max=len(groups) - 1)
        return (sequence_sums(loss_values, batch) / tokens[places]).sum() / len(groups)

    mean_of_sums = loss_values.sum() / denominator.sequences.clamp(min=1)
    if mode == "seq-mean-token-sum":
        return mean_of_sums
    if mode == "seq-mean-token-sum-norm":
        return mean_of_sums / denominator.length
    raise ValueError(f"unknown loss_agg_mode {mode!r}")


def sequence_sums(values: Tensor, batch: Batch) -> Tensor:
    """Return the sum of `values` [T] over each sequence: [N]."""
    return values.new_zeros(len(batch)).index_add(0, batch.sequence_ids, values)


def sequence_means(values: Tensor, batch: Batch) -> Tensor:
    """Return the mean of `values` [T] over the learned tokens of each sequence: [N].

    A sequence without learned tokens has 0.
    """
    lengths = sequence_sums(batch.loss_mask.to(values.dtype), batch).clamp(min=1)
    return sequence_sums(torch.where(batch.loss_mask, values, 0.0), batch) / lengths
