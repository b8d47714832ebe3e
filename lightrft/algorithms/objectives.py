"""What a model is trained on: log-probs of one micro-batch in, its share of the global loss out."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightrft.algorithms.kl import kl_estimators
from lightrft.algorithms.policy_loss import policy_losses
from lightrft.algorithms.reduce import Denominator, share_of_mean
from lightrft.config import AlgorithmSection
from lightrft.types import Batch, Experience

Report = dict[str, Tensor]
"""Metric name -> [T] values, averaged over learned tokens; the largest counts where the name ends in `_max`."""


def sft(logprobs: Tensor, batch: Batch, denominator: Denominator) -> tuple[Tensor, Report]:
    """Negative log-likelihood, mean over all learned tokens of the optimizer step. logprobs [T]; returns [] and no more."""
    return share_of_mean(-logprobs, batch, "token-mean", denominator), {}


@dataclass(frozen=True)
class PolicyObjective:
    """The policy gradient: a clipped loss of the ratio, and the divergence from the reference when asked for."""

    section: AlgorithmSection

    def __call__(self, logprobs: Tensor, batch: Experience, denominator: Denominator) -> tuple[Tensor, Report]:
        """Loss [] and reports [T] from the actor's log-probs [T].

        Without `old_logprobs` the actor has not moved since the step began, so the ratio is 1 and only its gradient counts.
        """
        missing = [name for name in ("advantages", "engine_logprobs") if getattr(batch, name) is None]
        if missing:
            raise ValueError(f"the policy gradient needs {', '.join(missing)} in the batch")
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        values, report = self.policy_loss(logprobs, old, batch.advantages, **self.policy_loss_options)
        if batch.reference_logprobs is not None:
            divergence = self.kl(logprobs, batch.reference_logprobs)
            report["train/kl"] = divergence
            values = values + self.section.init_kl_coef * divergence
        report |= mismatch(old, batch.engine_logprobs)
        return share_of_mean(values, batch, self.section.loss_agg_mode, denominator), report

    @cached_property
    def policy_loss(self):
        return policy_losses[self.section.policy_loss]

    @cached_property
    def policy_loss_options(self) -> dict[str, float | None]:
        section = self.section
        return {"eps_clip_low": section.eps_clip_low, "eps_clip_high": section.eps_clip_high, "dual_clip": section.dual_clip}

    @cached_property
    def kl(self):
        return kl_estimators[self.section.kl_estimator]


def mismatch(trainer_logprobs: Tensor, engine_logprobs: Tensor) -> Report:
    """How far the engine that sampled is from the trainer that learns, for the same weights. [T], [T] -> [T] each."""
    difference = (trainer_logprobs - engine_logprobs).detach().abs()
    return {
        "engine/logprob_mismatch": difference,
        "engine/logprob_mismatch_max": difference,
        "engine/probability_ratio": torch.exp(difference),
    }
