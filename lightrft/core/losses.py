"""Policy losses, one value per token, and the only place where these become a scalar.

A loss takes the log-probs of the actor now and before the step, and advantages, [T] each, and
returns values [T] and reports [T]. r = exp(logp - old). Its keyword-only parameters are options, or
columns of the batch, or the `batch` itself.

The denominator counts the whole optimizer step, over all ranks and micro-batches, so the sum of all
shares is the same for every way of splitting the step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrft.core.batch import Batch

Sum = Callable[[Tensor], Tensor]
"""Function that returns the sum of a tensor over all ranks."""
Report = dict[str, Any]
"""Metric name -> values [T] to average over learned tokens, or Weighted ones; `_max` and `_min` take
the extreme."""
PolicyLoss = Callable[..., tuple[Tensor, Report]]


class Weighted(NamedTuple):
    """Values to report, with a weight for each in the mean; both have the same shape."""

    values: Tensor
    weight: Tensor


def ppo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    eps_clip_low: float = 0.2,
    eps_clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Report]:
    """-min(r A, clip(r, 1 - low, 1 + high) A).

    Schulman et al., arXiv 1707.06347, equation 7; different bounds below and above: DAPO, arXiv
    2503.14476, equation 10. With `dual_clip` c the loss of a negative advantage is at most -c A: Ye
    et al., arXiv 1912.09729, equation 5.
    """
    ratio = (logprobs - old).exp()
    loss, report = clipped_surrogate(
        ratio, ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high), advantages
    )
    if dual_clip is not None:
        bound = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        report["train/clip_dual"] = loss > bound
        loss = torch.min(loss, bound)
    return loss, report


def gspo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    batch: Batch,
    eps_clip_low: float = 0.2,
    eps_clip_high: float = 0.2,
) -> tuple[Tensor, Report]:
    """ppo with one ratio for a whole sequence: s = exp(mean of log r over the tokens).

    GSPO, arXiv 2507.18071.
    """
    ratio = sequence_means(logprobs - old, batch).exp()[batch.sequence_ids]
    return clipped_surrogate(ratio, ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high), advantages)


def reinforce(logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, Report]:
    """-A logp.

    Williams, Machine Learning 8, 1992. Changes of the policy since the samples were drawn are not
    corrected.
    """
    return -advantages * logprobs, {"train/ratio": (logprobs - old).exp()}


def clipped_surrogate(ratio: Tensor, bounded: Tensor, advantages: Tensor) -> tuple[Tensor, Report]:
    """-min(r A, b A), with the bounded ratio b; report where b counts."""
    plain_loss = -ratio * advantages
    clipped_loss = -bounded * advantages
    report = {
        "train/ratio": ratio,
        "train/clip_low": (clipped_loss > plain_loss) & (advantages < 0),
        "train/clip_high": (clipped_loss > plain_loss) & (advantages > 0),
    }
    return torch.max(plain_loss, clipped_loss), report


# -- from tokens to a scalar


@dataclass(frozen=True, slots=True)
class Denominator:
    """Counts of the optimizer step, over all ranks."""

    tokens: Tensor
    """Number of learned tokens, [] float32."""
    sequences: Tensor
    """Number of sequences with at least one learned token, [] float32."""
    updates_before: int = 0
    """Number of optimizer steps that have used the samples before this one."""
    more: Any = None
    """Counts of another way to take the mean; see Mean."""


Mean = Callable[[Tensor, Batch, Denominator], Tensor]
"""(values [T], batch, denominator) -> this micro-batch's share of the global mean: [] float32."""


def token_mean(values: Tensor, batch: Batch, denominator: Denominator) -> Tensor:
    """Sum over tokens / all tokens (DAPO, arXiv 2503.14476)."""
    return torch.where(batch.loss_mask, values, 0.0).sum() / denominator.tokens.clamp(min=1)


def sequence_mean(values: Tensor, batch: Batch, denominator: Denominator) -> Tensor:
    """Mean per sequence, then over sequences (GRPO, arXiv 2402.03300)."""
    return sequence_means(values, batch).sum() / denominator.sequences.clamp(min=1)


def sequence_sums(values: Tensor, batch: Batch) -> Tensor:
    """Return the sum of `values` [T] over each sequence: [N]."""
    return values.new_zeros(len(batch)).index_add(0, batch.sequence_ids, values)


def sequence_means(values: Tensor, batch: Batch) -> Tensor:
    """Return the mean of `values` [T] over the learned tokens of each sequence: [N].

    A sequence without learned tokens has 0.
    """
    lengths = sequence_sums(batch.loss_mask.to(values.dtype), batch).clamp(min=1)
    return sequence_sums(torch.where(batch.loss_mask, values, 0.0), batch) / lengths
