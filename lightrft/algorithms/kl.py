"""Estimators of KL(actor || reference) from tokens the actor sampled; one value per token.

With d = log p_reference - log p_actor: http://joschu.net/blog/kl-approx.html (Schulman, 2020).
"""

from dataclasses import dataclass

from torch import Tensor

from lightrft.registry import Registry

MOST_CHANGE = 0.2
"""Largest relative distance from the target that one update takes into account."""

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
