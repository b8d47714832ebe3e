"""Options of the way from rewards to the advantage of each token, each one stage; see core/advantages.py.

Plain GRPO has PolicyLogprobs and RewardToGo of the core; build.py chooses the stages of a run.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lightrft.algorithms.advantage import explained_variance, gae, teacher_advantages, whiten
from lightrft.algorithms.roles.teacher import Teacher, TeacherOfTokens
from lightrft.core.advantages import PolicyLogprobs, Stage
from lightrft.core.batch import Experience, Rows, TrainingPlan
from lightrft.core.losses import Sum
from lightrft.core.metrics import Metrics

# -- outputs of models
#
# They depend on each sample alone, so they can be computed before other samples are complete
# (--overlap). An experience that already has them is left as it is.


class PolicyEntropy(PolicyLogprobs):
    """Computes the policy's log-probs before the update, and the entropy for later stages."""

    writes = ("old_logprobs", "entropy")

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        experience = plan.experience
        if experience.entropy is None:
            experience.old_logprobs, experience.entropy = self.policy.logprobs_and_entropy(
                experience, plan.microbatches
            )


class EngineLogprobs(Stage):
    """Takes the engine's log-probs in place of the policy's (--use_engine_logprobs)."""

    reads = ("engine_logprobs",)
    writes = ("old_logprobs",)
    depends_on_samples_alone = True

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        plan.experience.old_logprobs = plan.experience.engine_logprobs


class ModelOutputs(Stage):
    """Computes a column of tokens with a frozen or another model: a reference or a critic."""

    depends_on_samples_alone = True

    def __init__(self, column: str, compute: Callable[[Experience, Rows], Tensor]):
        self.compute = compute
        self.writes = (column,)

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        (column,) = self.writes
        if getattr(plan.experience, column) is None:
            setattr(plan.experience, column, self.compute(plan.experience, plan.microbatches))


# -- advantages of tokens


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
        rewards, values = experience.reward_advantages, experience.values
        experience.advantages, returns = gae(
            rewards, values, experience, gamma=self.gamma, lambd=self.lambd
        )
        experience.returns = returns.float()

        # how well the critic's values before the step explain all ranks' returns
        learned = experience.loss_mask
        metrics.mean("critic/return", experience.returns, learned)
        explained = explained_variance(experience.values, experience.returns, learned, self.total)
        metrics.mean("critic/explained_variance", explained, explained.isfinite())


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
