"""Rollout correction: weights for tokens that another policy sampled.

The engine's probabilities differ slightly from the trainer's, or an older policy sampled. With w =
p_old / p_engine, the ratio of the trainer's policy before the step to the sampling policy, each
function returns the weight of a token's loss, without gradient. This keeps the proximal policy, the
reference of the clip, apart from the behaviour policy: the decoupled objective of Hilton et al.
(arXiv 2110.00641), which is also used to learn from samples of older weights. `per="token"` says
that a weight depends on its own ratio alone; a user's own correction may say so too.
"""

import torch
from torch import Tensor

from lightrft.core.batch import Experience
from lightrft.core.losses import sequence_means, sequence_sums
from lightrft.registry import Registry

corrections = Registry("rollout correction", flag="--rollout_correction")
MASK_BOUNDS = {"sequence": (0.5, 2.0), "geometric": (0.999, 1.002)}
"""--rollout_mask -> default lower and upper bound of the measure of a sequence.

A product of many ratios is far from 1 where their geometric mean is within thousandths of it.
"""


@corrections.register("tis", per="token")
def tis(ratio: Tensor, *, rollout_correction_high: float) -> Tensor:
    """min(w, C): truncated importance sampling.

    Ionides, J. Comp. Graph. Stat. 17, 2008; for rollouts Yao et al., 2025.
    """
    return ratio.clamp(max=rollout_correction_high)


@corrections.register("mis", "icepop", per="token")
def mis(ratio: Tensor, *, rollout_correction_low: float, rollout_correction_high: float) -> Tensor:
    """w within [low, high], else 0: masked importance sampling.

    Liu et al., "When Speed Kills Stability", 2025. At the level of tokens with [0.5, 5] it is
    IcePop (Ring-1T, arXiv 2510.18855); the name icepop sets these bounds.
    """
    return torch.where(
        (ratio >= rollout_correction_low) & (ratio <= rollout_correction_high), ratio, 0.0
    )


@corrections.register("none", per="token")
def none(ratio: Tensor) -> Tensor:
    """Return 1 for all tokens: no correction where --rollout_quantization would have one."""
    return torch.ones_like(ratio)


def importance_ratios(old_logprobs: Tensor, batch: Experience, level: str) -> Tensor:
    """Return w of each token, or the product or geometric mean of w over the whole sequence.

    [T] -> [T]. The geometric mean is not an importance weight: it is used to mask sequences,
    kept_sequences().
    """
    difference = (old_logprobs - batch.engine_logprobs).detach()
    difference = torch.where(batch.loss_mask, difference, 0.0)
    if level == "sequence":
        difference = sequence_sums(difference, batch)[batch.sequence_ids]
    elif level == "geometric":
        difference = sequence_means(difference, batch)[batch.sequence_ids]
    return difference.exp()


def off_policy(logprobs: Tensor, advantages: Tensor, batch: Experience, delta: float) -> Tensor:
    """Return [T] bool: A < 0, and log p_engine - log p has a mean over the sequence above delta.

    p is the policy that is updated now, so both causes count: older weights, and another engine.
    Bad responses that the policy would hardly give any more teach little, and can mislead it.
    DeepSeek-V3.2, arXiv 2512.02556.
    """
    distance = sequence_means((batch.engine_logprobs - logprobs).detach(), batch)
    return (advantages < 0) & (distance > delta)[batch.sequence_ids]


def kept_sequences(
    old_logprobs: Tensor, batch: Experience, level: str, low: float | None, high: float | None
) -> Tensor:
    """Return [T] bool: tokens of sequences whose w is within [low, high].

    The measure of a sequence is the product ("sequence") or the geometric mean ("geometric") of w.
    Whole sequences are rejected; the tokens of the others keep the weights of a correction: Liu et
    al., 2025. None stands for the bound in MASK_BOUNDS.
    """
    measure = importance_ratios(old_logprobs, batch, level)
    least, most = MASK_BOUNDS[level]
    return (measure >= (least if low is None else low)) & (
        measure <= (most if high is None else high)
    )
