"""Estimators of KL(actor || reference) from tokens the actor sampled; one value per token.

With d = log p_reference - log p_actor: http://joschu.net/blog/kl-approx.html (Schulman, 2020).
"""

from torch import Tensor

from lightrft.registry import Registry

kl_estimators = Registry("KL estimator", flag="--kl_estimator")


@kl_estimators.register("k1")
def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """-d: unbiased, noisy, its sign can be negative."""
    return logprobs - reference_logprobs


@kl_estimators.register("k2")
def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d^2 / 2: biased, but its gradient is that of the divergence."""
    return (logprobs - reference_logprobs).square() / 2


@kl_estimators.register("k3")
def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1: unbiased and never negative."""
    d = reference_logprobs - logprobs
    return d.expm1() - d  # exp(d) - 1 of a small d loses its digits, and the result its sign
