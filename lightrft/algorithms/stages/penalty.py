"""Subtract the KL penalty from the rewards of tokens, and adapt coefficients."""

import torch
from torch import Tensor

from lightrft.algorithms.advantage import rloo_penalty
from lightrft.algorithms.kl import EntropyCoefficient, KLCoefficient, kl_estimators
from lightrft.config.sections import AlgorithmSection
from lightrft.core.advantages import Stage
from lightrft.core.batch import Experience, TrainingPlan
from lightrft.core.losses import sequence_sums
from lightrft.core.metrics import Metrics
from lightrft.models.parallel.collectives import Axis


class KLPenalty(Stage):
    """Subtracts the KL divergence from the reference, times the coefficient, from each token.

    It comes after the estimator has compared the rewards, so it is in no mean and no deviation of a
    group. rloo alone compares the penalties too. With --use_kl_loss the penalty is in the loss, and
    only the coefficient is adapted here.
    """

    reads = ("old_logprobs", "reference_logprobs", "reward_advantages")
    writes = ("reward_advantages",)

    def __init__(self, section: AlgorithmSection, coefficient: KLCoefficient, data: Axis):
        self.section = section
        self.coefficient = coefficient
        self.data = data
        self.kl = kl_estimators[section.kl_estimator]
        self.compares = section.advantage_estimator == "rloo" and not section.kl_after_baseline
        """True if the penalties of responses are compared like their rewards."""

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        experience = plan.experience
        learned = experience.loss_mask
        kl = self.kl(experience.old_logprobs, experience.reference_logprobs)
        kl = torch.where(learned, kl, 0.0)

        # One sum over all ranks, so that every rank adapts the coefficient alike.
        local = torch.tensor(
            [kl.double().sum(), learned.sum(), len(experience)], dtype=torch.float64
        )
        total, tokens, samples = self.data.sum(local).tolist()
        self.coefficient.update(total / max(tokens, 1), int(samples))
        metrics.mean("rollout/kl", kl, learned)
        metrics.mean("rollout/kl_coef", self.coefficient.value)

        if not self.section.use_kl_loss:
            penalty = self._compared(experience, self.coefficient.value * kl)
            experience.reward_advantages = experience.reward_advantages - penalty

    def _compared(self, experience: Experience, penalty: Tensor) -> Tensor:
        """Return the penalty of each token: [T].

        If whole responses are compared by penalty, the comparison goes to the last learned token of
        each response.
        """
        if not self.compares:
            return penalty

        tokens = experience.learned_tokens
        last = tokens.new_full((len(experience),), -1)
        last = last.scatter_reduce(0, experience.sequence_ids[tokens], tokens, "amax")
        learned = last >= 0
        sums = sequence_sums(penalty.double(), experience)
        shares = self.data.gather(torch.column_stack([sums, experience.groups, learned]))

        # Every rank compares all responses, because a group may lie on several ranks.
        sums, groups, counted = torch.cat(shares).unbind(1)
        compared = rloo_penalty(sums, groups, counted.bool())
        first = sum(map(len, shares[: self.data.rank]))
        local = compared[first : first + len(experience)][learned].to(penalty.dtype)
        return torch.zeros_like(penalty).index_put((last[learned],), local)


class EntropyControl(Stage):
    """Adapts the coefficient of the entropy bonus to the entropy before the update."""

    reads = ("entropy",)

    def __init__(self, coefficient: EntropyCoefficient, data: Axis):
        self.coefficient = coefficient
        self.data = data

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        learned = plan.experience.loss_mask
        entropy = torch.where(learned, plan.experience.entropy, 0.0).double().sum()
        # One sum over all ranks, so that every rank adapts the coefficient alike.
        total, tokens = self.data.sum(torch.stack([entropy, learned.sum().double()])).tolist()
        self.coefficient.update(total / max(tokens, 1))
        metrics.mean("rollout/entropy_coef", self.coefficient.value)
