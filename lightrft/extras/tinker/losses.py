"""Losses of Tinker: a sum over all targets of a request, not a mean.

tinker-docs.thinkingmachines.ai/tinker/losses has the equations. p is the probability of a target
now and q the one in the request's `logprobs`; r = p / q, A is the advantage.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from lightrft.algorithms import policy_loss
from lightrft.core.batch import Batch
from lightrft.core.losses import PolicyLoss

CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of the ratio, with the defaults; a datum may also have its own for each target."""
RATIO_MASK = "sequence_ratio_mask"


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss: the inputs that it reads of a request, and its function."""

    compute: Callable[..., Tensor]
    """(log-probs [T], batch, **config) -> one value for each token, [T]."""
    columns: tuple[str, ...]
    """Columns that each datum has, beside `target_tokens`."""
    config: Mapping[str, float] = field(default_factory=dict)
    """Entries of `loss_fn_config`, with the defaults."""
    per_target: tuple[str, ...] = ()
    """Entries of the configuration that a datum may have for each target."""


def cross_entropy(logprobs: Tensor, batch: Batch) -> Tensor:
    """-w log p."""
    return -logprobs * batch.weights


def importance_sampling(logprobs: Tensor, batch: Batch) -> Tensor:
    """-r A."""
    return -(logprobs - _reference(logprobs, batch)).exp() * batch.advantages


def dro(logprobs: Tensor, batch: Batch, *, beta: float) -> Tensor:
    """-(A log p - beta / 2 (log r)^2)."""
    old = _reference(logprobs, batch)
    return policy_loss.dro(logprobs, old, batch.advantages, policy_drift_coef=beta)[0]


def clipped(
    loss: PolicyLoss,
    logprobs: Tensor,
    batch: Batch,
    *,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> Tensor:
    """Compute a loss of algorithms/policy_loss.py whose ratio has these bounds."""
    bounds = {"clip_low_threshold": clip_low_threshold, "clip_high_threshold": clip_high_threshold}
    low, high = (
        batch.extra_columns.get(name, torch.full_like(logprobs, bound))
        for name, bound in bounds.items()
    )
    old = _reference(logprobs, batch)
    values, _ = loss(logprobs, old, batch.advantages, eps_clip_low=1 - low, eps_clip_high=high - 1)
    return values


def gspo(logprobs: Tensor, batch: Batch, **bounds: float) -> Tensor:
    """-min(s A, clip(s) A), s of the tokens that `sequence_ratio_mask` marks; see gspo_token()."""
    marked = replace(batch, loss_mask=batch.extra_columns[RATIO_MASK] != 0, learned=None)
    loss = partial(policy_loss.gspo_token, batch=marked)
    return clipped(loss, logprobs, batch, **bounds)


def _reference(logprobs: Tensor, batch: Batch) -> Tensor:
    """Return log q [T]; where nothing is learned it is log p, so that no ratio overflows."""
    read = batch.advantages != 0
    if RATIO_MASK in batch.extra_columns:
        read = read | (batch.extra_columns[RATIO_MASK] != 0)
    return torch.where(read, batch.logprobs, logprobs.detach())


SAMPLED = ("logprobs", "advantages")
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",)),
    "importance_sampling": Loss(importance_sampling, SAMPLED),
    "ppo": Loss(partial(clipped, policy_loss.ppo), SAMPLED, CLIPS, tuple(CLIPS)),
    "cispo": Loss(partial(clipped, policy_loss.cispo), SAMPLED, CLIPS, tuple(CLIPS)),
    "gspo": Loss(gspo, (*SAMPLED, RATIO_MASK), CLIPS, tuple(CLIPS)),
    "dro": Loss(dro, SAMPLED, {"beta": 0.05}),
}
"""Name of a loss in requests -> the loss."""
MISSING_LOSSES = {
    "stable_reinforce": "it needs what Tinker's own sampler records",
    "custom": "the client computes custom losses, as create_custom_loss tells it to",
}
"""Losses of the SDK that this server does not have -> the reason."""
