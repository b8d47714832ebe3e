"""Policy losses: one value per token, from the log-probs of the actor now and before the step.

Each takes logprobs, old and advantages, [T] each, and returns the values [T] and reports
of each token [T]. r = exp(logp - old), sg is the value without a gradient. The keyword-only
parameters of a loss are fields of the algorithm section, or one of: `batch`, the sequences;
`marked` [T], the tokens that covariance.py chose for it. `per` says whether the value of a token
depends on its own log-probs alone (token) or on its whole sequence; a user's own loss says so too,
by register("mine", per="token") or mine.properties = {"per": "token"}. Gradients of such a
loss are known before the whole batch is, which is faster.
"""

import math

import torch
from torch import Tensor

from lightrft.core.batch import Batch
from lightrft.core.losses import (
    Reported,
    clipped_surrogate,
    gspo,
    ppo,
    reinforce,
    sequence_means,
    sequence_sums,
)
from lightrft.registry import Registry

policy_losses = Registry("policy loss", flag="--policy_loss")
policy_losses.register("ppo", per="token")(ppo)
policy_losses.register("gspo", per="sequence")(gspo)
policy_losses.register("reinforce", per="token")(reinforce)
STABLE_RATIO = 1e3
"""stable_reinforce: largest ratio, and smallest inverse of one, before anything else."""
STABLE_ADVANTAGE = 3.0
"""stable_reinforce: largest size of an advantage that is learned from."""


@policy_losses.register("gspo_token", per="sequence")
def gspo_token(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    batch: Batch,
    eps_clip_low: float,
    eps_clip_high: float,
) -> Reported:
    """s_t = sg(s) p / sg(p): the value of gspo, and each token's own gradient.

    This is for advantages that differ within a sequence. GSPO-token, arXiv 2507.18071, section 4.3.
    """
    ratio = sequence_means(logprobs - old, batch).exp()[batch.sequence_ids]
    ratio = ratio.detach() * (logprobs - logprobs.detach()).exp()
    return clipped_surrogate(ratio, ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high), advantages)


@policy_losses.register("gmpo", per="sequence")
def gmpo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    batch: Batch,
    eps_clip_low: float,
    eps_clip_high: float,
) -> Reported:
    """-A times the geometric mean of a sequence's ratios, clipped to [exp(-low), exp(high)].

    Only the side that A favours is clipped. In the paper (GMPO, arXiv 2507.20673) a sequence has
    one advantage. Here each token has its own, and they are the same unless rewards of steps,
    --gamma or a teacher make them differ.
    """
    log_ratio = logprobs - old
    sign = advantages.sign()
    bounded = log_ratio.clamp(-eps_clip_low, eps_clip_high)
    clipped_log_ratio = sign * torch.min(sign * log_ratio, sign * bounded)
    ratio = sequence_means(clipped_log_ratio, batch).exp()[batch.sequence_ids]
    report = {
        "train/ratio": log_ratio.exp(),
        "train/clip_low": (log_ratio < -eps_clip_low) & (advantages < 0),
        "train/clip_high": (log_ratio > eps_clip_high) & (advantages > 0),
    }

    return -advantages * ratio, report


@policy_losses.register("cispo", per="token")
def cispo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, eps_clip_low: float, eps_clip_high: float
) -> Reported:
    """-sg(clip(r, 1 - low, 1 + high)) A logp: the weight is clipped, no token loses the gradient.

    MiniMax-M1, arXiv 2506.13585.
    """
    ratio = (logprobs - old).exp().detach()
    report = {
        "train/ratio": ratio,
        "train/clip_low": ratio < 1 - eps_clip_low,
        "train/clip_high": ratio > 1 + eps_clip_high,
    }
    return -ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high) * advantages * logprobs, report


@policy_losses.register("sapo", per="token")
def sapo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    sapo_tau_positive: float,
    sapo_tau_negative: float,
) -> Reported:
    """-4 / tau sigmoid(tau (r - 1)) A, with tau chosen by the sign of A.

    This is a soft gate: the slope is A at r = 1 and falls to both sides. SAPO, arXiv 2511.20347.
    """
    ratio = (logprobs - old).exp()
    tau = torch.full_like(advantages, sapo_tau_negative)
    tau = tau.masked_fill(advantages > 0, sapo_tau_positive)
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, {"train/ratio": ratio}


@policy_losses.register("vespo", per="sequence")
def vespo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    batch: Batch,
    vespo_power: list[float],
    vespo_decay: list[float],
) -> Reported:
    """-sg(w^k e^(l (1 - w))) A logp, with the product w of a sequence's ratios.

    k and l are the first numbers of `vespo_power` and `vespo_decay` for A >= 0, and the second ones
    otherwise. Log ratios have at most the size 20, and w is at least 1e-8. VESPO, arXiv 2602.10693.
    """
    log_ratio = torch.where(batch.loss_mask, logprobs - old, 0.0).detach().clamp(-20, 20)
    total = sequence_sums(log_ratio, batch).clamp(math.log(1e-8), 20)[batch.sequence_ids]
    sign = (advantages < 0).long()
    power, decay = (advantages.new_tensor(pair)[sign] for pair in (vespo_power, vespo_decay))
    weight = (power * total - decay * total.expm1()).exp()
    report = {"train/ratio": log_ratio.exp(), "train/sequence_weight": weight}
    return -weight * advantages * logprobs, report


@policy_losses.register("cpgd", per="token")
def cpgd(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
    policy_drift_coef: float,
    policy_drift_clip: float | None = None,
) -> Reported:
    """-min(log r A, clip(log r, log(1 - low), log(1 + high)) A) + c (r - 1 - log r).

    No ratio multiplies the advantage. The last term estimates the divergence of the old policy from
    the new (k3), at most `policy_drift_clip` for each token, so that none outweighs the rest. CPGD,
    arXiv 2505.12504.
    """
    log_ratio = logprobs - old
    bounded = log_ratio.clamp(math.log(1 - eps_clip_low), math.log(1 + eps_clip_high))
    loss, report = clipped_surrogate(log_ratio, bounded, advantages)
    drift = log_ratio.expm1() - log_ratio
    report |= {"train/ratio": log_ratio.exp(), "train/policy_drift": drift}
    counted = drift if policy_drift_clip is None else drift.clamp(max=policy_drift_clip)
    return loss + policy_drift_coef * counted, report


@policy_losses.register("dppo_tv", per="token")
def dppo_tv(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, eps_clip_low: float, eps_clip_high: float
) -> Reported:
    """-r A M, M = 0 where |p - p_old| exceeds the bound and A moves p further away.

    |p - p_old| is the total variation of token or not token. A token that was rare may change its
    ratio freely, and a likely one may not take much probability from others. `eps_clip_low` bounds
    what p loses, `eps_clip_high` what it gains. DPPO with binary TV, arXiv 2602.04879.
    """
    divergence = (logprobs.exp() - old.exp()).abs().detach()
    return trust_region(logprobs - old, advantages, divergence, eps_clip_low, eps_clip_high)


@policy_losses.register("dppo_kl", per="token")
def dppo_kl(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, eps_clip_low: float, eps_clip_high: float
) -> Reported:
    """dppo_tv with p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)) as the divergence.

    DPPO with binary KL, arXiv 2602.04879.
    """
    now = logprobs.detach()
    other = (-now.expm1()).clamp(min=0)
    old_other = (-old.expm1()).clamp(min=0)
    # xlogy(0, 0) is 0: what was never another token cannot diverge there.
    of_others = torch.xlogy(old_other, old_other) - torch.xlogy(old_other, other)
    divergence = old.exp() * (old - now) + of_others
    return trust_region(logprobs - old, advantages, divergence, eps_clip_low, eps_clip_high)


@policy_losses.register("dro", per="token")
def dro(logprobs: Tensor, old: Tensor, advantages: Tensor, *, policy_drift_coef: float) -> Reported:
    """-(A logp - beta / 2 (logp - old)^2), beta = `policy_drift_coef`.

    Nothing is clipped: the square holds the policy. Direct reward optimisation, Richemond et al.,
    arXiv 2405.19107, in the form of Kimi k1.5, arXiv 2501.12599, for each token as in
    Tinker.
    """
    log_ratio = logprobs - old
    drift = log_ratio.square() / 2
    report = {"train/ratio": log_ratio.exp(), "train/policy_drift": drift}
    return policy_drift_coef * drift - advantages * logprobs, report


@policy_losses.register("stable_reinforce", per="token")
def stable_reinforce(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, eps_clip_low: float, eps_clip_high: float
) -> Reported:
    """ppo with log r within log 1e-3 and log 1e3, and without tokens where |A| is above 3.

    The bounds of log r come before the exponential, so no ratio overflows; advantages come from
    --advantages_norm, in standard deviations. StableReinforce, R1-Reward, arXiv 2505.02835; the
    bounds of log r are in the authors' code.
    """
    limit = math.log(STABLE_RATIO)
    outliers = advantages.abs() > STABLE_ADVANTAGE
    ratio = (logprobs - old).clamp(-limit, limit).exp()
    kept = torch.where(outliers, 0.0, advantages)
    bounded = ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high)
    loss, report = clipped_surrogate(ratio, bounded, kept)
    return loss, report | {"train/advantages_dropped": outliers}


@policy_losses.register("kl_cov", per="token")
def kl_cov(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, marked: Tensor, kl_cov_coef: float
) -> Reported:
    """-r A, plus c |log r| for the tokens with the highest covariance of logp and A.

    These reduce the entropy most. KL-Cov: Cui et al., arXiv 2505.22617.
    """
    log_ratio = logprobs - old
    penalty = torch.where(marked, kl_cov_coef * log_ratio.abs(), 0.0)
    report = {"train/ratio": log_ratio.exp(), "train/cov_marked": marked}
    return -log_ratio.exp() * advantages + penalty, report


@policy_losses.register("clip_cov", per="token")
def clip_cov(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    marked: Tensor,
    eps_clip_low: float,
    eps_clip_high: float,
) -> Reported:
    """ppo, without some tokens that are drawn where the covariance of logp and A is high.

    Clip-Cov, arXiv 2505.22617. A token that ppo already clips has no gradient, and is not left out.
    It may have been drawn all the same: the draw is made before the step, for all ranks at once,
    when nothing is clipped yet.
    """
    ratio = (logprobs - old).exp()
    bounded = ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high)
    loss, report = clipped_surrogate(ratio, bounded, advantages)
    left_out = marked & ~(report["train/clip_low"] | report["train/clip_high"])
    return torch.where(left_out, 0.0, loss), report | {"train/cov_marked": left_out}


def trust_region(
    log_ratio: Tensor, advantages: Tensor, divergence: Tensor, low: float, high: float
) -> Reported:
    """-r A, 0 where the divergence exceeds the bound of the side that A moves the token to."""
    ratio = log_ratio.exp()
    report = {
        "train/ratio": ratio,
        "train/clip_low": (divergence > low) & (log_ratio < 0) & (advantages < 0),
        "train/clip_high": (divergence > high) & (log_ratio > 0) & (advantages > 0),
    }
    outside = report["train/clip_low"] | report["train/clip_high"]
    return torch.where(outside, 0.0, -ratio * advantages), report
