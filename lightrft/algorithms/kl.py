"""Divergences of the actor from other models, one value per token, and adapted coefficients.

The estimators of KL(actor || reference) need only the tokens that the actor sampled. With
d = log p_reference - log p_actor: http://joschu.net/blog/kl-approx.html (Schulman, 2020).
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightrft.registry import Registry

MOST_CHANGE = 0.2
"""Largest relative distance from the target that one update takes into account."""

SMALLEST_REST = 1e-6
"""Smallest probability of the rest of the vocabulary that generalized_jsd() distinguishes.

Log-probs in float32 do not determine a smaller one.
"""

kl_estimators = Registry("KL estimator", flag="--kl_estimator")


@kl_estimators.register("k1")
def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """-d: unbiased, noisy, the sign can be negative."""
    return logprobs - reference_logprobs


@kl_estimators.register("k2")
def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d^2 / 2: biased, but it has the gradient of the divergence."""
    return (logprobs - reference_logprobs).square() / 2


@kl_estimators.register("k3")
def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1: unbiased and never negative."""
    d = reference_logprobs - logprobs
    return d.expm1() - d  # exp(d) - 1 of a small d loses its digits, and the result its sign


@kl_estimators.register("k3+")
def k3_with_gradient_of_k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return the value of k3, unbiased and never negative, with the gradient of k2.

    k2 has the gradient of the divergence. The gradient of k3 belongs to the divergence with swapped
    arguments: Tang and Munos, arXiv 2506.09477.
    """
    with_gradient = k2(logprobs, reference_logprobs)
    return with_gradient + (k3(logprobs, reference_logprobs) - with_gradient).detach()


def generalized_jsd(logprobs: Tensor, teacher_logprobs: Tensor, beta: float) -> Tensor:
    """Return how far the actor is from the teacher at each position: [T, K], [T, K] -> [T].

    The columns are the same K tokens for both, the teacher's likeliest. All other tokens count as
    one more token, the rest: P_rest = 1 - sum P. So both sides are distributions, a divergence is
    never negative, and it is at most the divergence over the whole vocabulary, which it equals when
    the K tokens are all tokens. Without the rest, nothing would keep the actor from moving
    probability to tokens that the teacher does not name.

    With the teacher P, the actor Q and M = beta P + (1 - beta) Q, as in GKD, Agarwal et al.,
    arXiv 2306.13649, section 3:

        beta 0      KL(P || Q), the forward divergence
        beta 1      KL(Q || P), the reverse divergence
        in between  beta KL(P || M) + (1 - beta) KL(Q || M), the generalised JSD

    Only `logprobs` get a gradient. A teacher's log-prob of -inf says that no token is in the
    column. A rest below SMALLEST_REST is raised to it and has no gradient.
    """
    absent = teacher_logprobs.isneginf()
    # As small as an absent token: 0 times -inf would be NaN.
    none = torch.finfo(torch.float32).min / 4
    teacher = _with_rest(torch.where(absent, none, teacher_logprobs.detach()))
    actor = _with_rest(torch.where(absent, none, logprobs))

    if beta == 0:
        return _kl(teacher, actor)
    if beta == 1:
        return _kl(actor, teacher)

    mean = torch.logaddexp(teacher + math.log(beta), actor + math.log1p(-beta))
    return beta * _kl(teacher, mean) + (1 - beta) * _kl(actor, mean)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Append the log-prob of all other tokens: [T, K] -> [T, K + 1]."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=SMALLEST_REST)
    return torch.cat([logprobs, rest.log()], dim=-1)


def _kl(logprobs: Tensor, other: Tensor) -> Tensor:
    return (logprobs.exp() * (logprobs - other)).sum(-1)


@dataclass
class KLCoefficient:
    """Coefficient of the divergence.

    It is fixed, or adapted after every step to bring the divergence near a target.
    """

    value: float
    target: float | None = None
    """Target divergence per token."""
    horizon: int = 10_000

    def update(self, divergence: float, num_samples: int) -> None:
        """beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon).

        Ziegler et al., arXiv 1909.08593, section 2.2.
        """
        if self.target is not None:
            error = min(max(divergence / self.target - 1, -MOST_CHANGE), MOST_CHANGE)
            self.value *= 1 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore an adapted coefficient. A fixed one comes from the configuration."""
        if self.target is not None:
            self.value = state["value"]


@dataclass
class EntropyCoefficient:
    """Coefficient of the entropy bonus.

    It is fixed, or adapted after every step to keep the entropy from falling below a target.
    """

    adapted: float
    target: float | None = None
    """Target entropy per token, in nats."""
    step: float = 0.005
    """How much one step changes the coefficient."""
    value: float = field(init=False)
    """Coefficient of this step: 0 while the entropy is above the target."""

    def __post_init__(self) -> None:
        self.value = self.adapted

    def update(self, entropy: float) -> None:
        """alpha_k = c_k 1[H_k <= target], c_{k+1} = c_k + step if H_k < target, else c_k - step.

        H_k is the entropy before step k, and alpha_k the coefficient in it. c is never negative.
        Skywork-OR1: He et al., arXiv 2505.22312, section 4.
        """
        if self.target is None:
            return
        self.value = self.adapted if entropy <= self.target else 0.0
        if entropy < self.target:
            self.adapted += self.step
        elif entropy > self.target:
            self.adapted = max(self.adapted - self.step, 0.0)

    def state_dict(self) -> dict[str, float]:
        return {"adapted": self.adapted}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.adapted = state["adapted"]
