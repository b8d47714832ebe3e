"""Set the advantage of each token from what the rewards after it are worth."""

import torch

from lightrft.algorithms.advantage import gae, reward_to_go, teacher_advantages, whiten
from lightrft.algorithms.reduce import Sum
from lightrft.observe.metrics import Metrics
from lightrft.roles.teacher import Teacher, TeacherOfTokens
from lightrft.rollout.measure import measure_values
from lightrft.rollout.plan import Stage, TrainingPlan


class RewardToGo(Stage):
    """Sums the advantages of the rewards from each token on, discounted by gamma.

    They are what the estimator made of the rewards, less the penalty of --init_kl_coef.
    """

    reads = ("reward_advantages",)
    writes = ("advantages",)

    def __init__(self, gamma: float):
        self.gamma = gamma

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        experience = plan.experience
        experience.advantages = reward_to_go(
            experience.reward_advantages, experience, gamma=self.gamma
        )


class GeneralizedAdvantages(Stage):
    """Estimates advantages with the critic's values (GAE), and the returns that it learns."""

    reads = ("reward_advantages", "values")
    writes = ("advantages", "returns")

    def __init__(self, gamma: float, lambd: float, total: Sum):
        self.gamma = gamma
        self.lambd = lambd
        self.total = total

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        experience = plan.experience
        experience.advantages, returns = gae(
            experience.reward_advantages,
            experience.values,
            experience,
            gamma=self.gamma,
            lambd=self.lambd,
        )
        experience.returns = returns.float()
        measure_values(experience, self.total, metrics)


class TeacherTerm(Stage):
    """Adds what the teacher says about each token to the advantage (--distill_coef)."""

    reads = ("old_logprobs", "advantages")
    writes = ("advantages",)

    def __init__(self, teacher: Teacher, coefficient: float):
        self.teacher = teacher
        self.coefficient = coefficient

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        experience = plan.experience
        learned = experience.loss_mask
        logprobs = self.teacher.logprobs(experience, plan.microbatches)
        # The teacher judges only what the policy sampled.
        gap = torch.where(learned, teacher_advantages(experience.old_logprobs, logprobs), 0.0)
        metrics.mean("rollout/teacher_kl", -gap, learned)
        experience.advantages = experience.advantages + self.coefficient * gap


class TeacherDistribution(Stage):
    """Computes the teacher's likeliest tokens at each position (--distill_top_k).

    The divergence from them is part of the loss; see algorithms/kl.py.
    """

    writes = ("candidates", "teacher_logprobs")

    def __init__(self, teacher: TeacherOfTokens, num_candidates: int):
        self.teacher = teacher
        self.num_candidates = num_candidates

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        experience = plan.experience
        logprobs, ids = self.teacher.likeliest(experience, plan.microbatches, self.num_candidates)
        experience.teacher_logprobs = logprobs
        experience.candidates = ids
        named = logprobs.double().exp().sum(-1)
        metrics.mean("rollout/teacher_top_mass", named, experience.loss_mask)


class NormalizedAdvantages(Stage):
    """Scales advantages to mean 0 and variance 1 over all ranks (--advantages_norm); clips them."""

    reads = ("advantages",)
    writes = ("advantages",)

    def __init__(self, normalize: bool, clip: float | None, total: Sum):
        self.normalize = normalize
        self.clip = clip
        self.total = total

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        experience = plan.experience
        advantages = experience.advantages
        if self.normalize:
            advantages = whiten(advantages, experience.loss_mask, self.total)
        if self.clip is not None:
            advantages = advantages.clamp(-self.clip, self.clip)
        experience.advantages = advantages
