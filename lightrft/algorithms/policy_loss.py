"""Policy losses: one value per token, from the log-probs of the actor now and before the step."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightrft.registry import Registry

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
policy_losses = Registry("policy loss", flag="--policy_loss")


@policy_losses.register("ppo")
def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logp - old). All [T]; returns [T] and what to report, [T] each.

    Schulman et al., arXiv 1707.06347, equation 7; different bounds below and above: DAPO, arXiv 2503.14476, equation 10.
    With `dual_clip` c the loss of a negative advantage is at most -c A: Ye et al., arXiv 1912.09729, equation 5.
    """
    ratio = (logprobs - old_logprobs).exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high) * advantages
    loss = torch.max(unclipped, clipped)
    report = {
        "train/ratio": ratio,
        "train/clip_low": (clipped > unclipped) & (advantages < 0),
        "train/clip_high": (clipped > unclipped) & (advantages > 0),
    }
    if dual_clip is not None:
        bound = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        report["train/clip_dual"] = loss > bound
        loss = torch.min(loss, bound)
    return loss, report
