"""The way from rewards to the advantage of each token.

CompareRewards finds how much better each reward is than the others of its group. The stages follow:
first those that compute outputs of models, such as log-probs of the policy before the step, then
those that make advantages of tokens. build.py chooses the stages that a run needs; plain GRPO has
PolicyLogprobs and RewardToGo.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightrft.algorithms.advantage import (
    estimators,
    explained_variance,
    gae,
    teacher_advantages,
    weighted_by_difficulty,
    whiten,
)
from lightrft.algorithms.options import FIELDS, options_of
from lightrft.algorithms.shaping import RewardShaper
from lightrft.config.sections import AlgorithmSection
from lightrft.core.batch import Experience
from lightrft.core.batches import TrainingPlan
from lightrft.core.estimators import Estimator, reward_to_go
from lightrft.core.losses import Sum
from lightrft.core.metrics import Metrics
from lightrft.core.table import keywords
from lightrft.roles.critic import Critic
from lightrft.roles.policy import Policy
from lightrft.roles.teacher import Teacher, TeacherOfTokens
from lightrft.rollout.groups import GatheredRewards
from lightrft.rollout.plan import Stage

ESTIMATOR_INPUTS = {"lengths", "responses", "greedy_rewards", "components", "component_weights"}
"""Options of an estimator that come from the samples, not from the configuration."""


def data_columns(estimator: Estimator) -> list[str]:
    """Return the columns of the data that an estimator requires: [M] float32 each, a number for
    each reward.

    They are its keywords without a default that are neither flags nor computed here.
    """
    known = FIELDS | ESTIMATOR_INPUTS
    return [name for name, needed in keywords(estimator).items() if needed and name not in known]


class CompareRewards:
    """Calls the estimator of --advantage_estimator with the shaped rewards of all ranks.

    Rewards are shaped first, so that no statistic covers only one rank.
    """

    def __init__(
        self, section: AlgorithmSection, shaper: RewardShaper, weights: Mapping[str, float]
    ):
        """Find the estimator.

        `weights` has the weight of each reward by label.
        """
        self.section = section
        self.shaper = shaper if shaper.is_enabled else None
        self.weights = weights
        self.estimator: Estimator = estimators[section.advantage_estimator]
        self.options = options_of(self.estimator, section)
        self.given = keywords(self.estimator).keys() & ESTIMATOR_INPUTS
        self.reads_components = "components" in self.given
        self.columns = data_columns(self.estimator)

    def __call__(self, gathered: GatheredRewards) -> Tensor:
        """Return the advantage of each reward: [M]."""
        groups = gathered.groups.long()
        rewards = gathered.rewards.float()
        if self.shaper is not None:
            rewards = self.shaper(gathered.rewards, groups, gathered.response_lengths)
        given = {
            "lengths": gathered.lengths,
            "responses": gathered.rows,
            "greedy_rewards": gathered.greedy.float(),
        }
        given |= {name: values.float() for name, values in gathered.columns.items()}
        if self.reads_components:
            # Rounded like shaped rewards, whose float64 sums are exact: equal parts have no spread.
            given["components"] = torch.stack([*gathered.components.values()], 1).float()
            weights = [self._weight(name) for name in gathered.components]
            given["component_weights"] = torch.tensor(weights, dtype=torch.float64)

        arguments = self.options | {
            name: given[name] for name in (self.given | {*self.columns}) & given.keys()
        }
        advantages = self.estimator(rewards, groups, **arguments)

        # Estimators may be the user's own, and a NaN would only show up as a broken model.
        if advantages.shape != rewards.shape or not advantages.isfinite().all():
            raise ValueError(
                f"--advantage_estimator {self.section.advantage_estimator} returns"
                f" {advantages!r:.200}, but must return a finite advantage for each of the"
                f" {len(rewards)} rewards"
            )

        if self.section.difficulty_weights:
            least, most = self.section.difficulty_weights
            solved = gathered.solved_shares()
            advantages = weighted_by_difficulty(advantages, solved, least=least, most=most)
        return advantages

    def _weight(self, component: str) -> float:
        """Return the weight of the reward that a component belongs to.

        A reward with named parts has components LABEL_NAME.
        """
        labels = [each for each in self.weights if f"{component}_".startswith(f"{each}_")]
        return self.weights[max(labels, key=len)] if labels else 1.0


# -- outputs of models
#
# They depend on each sample alone, so they can be computed before other samples are complete
# (--overlap). An experience that already has them is left as it is.


class PolicyLogprobs(Stage):
    """Computes the policy's log-probs before the update, and the entropy if a later stage needs it.

    With a single update they equal the log-probs of the update itself. They are computed then only
    if they are `needed` by another stage.
    """

    depends_on_samples_alone = True

    def __init__(self, policy: Policy, *, entropy: bool = False, needed: bool = False):
        self.policy = policy
        self.entropy = entropy
        self.needed = needed
        self.writes = ("old_logprobs", "entropy") if entropy else ("old_logprobs",)

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        experience = plan.experience
        if self.entropy and experience.entropy is None:
            experience.old_logprobs, experience.entropy = self.policy.logprobs_and_entropy(
                experience, plan.microbatches
            )
        elif experience.old_logprobs is None and (self.needed or len(plan.updates) > 1):
            experience.old_logprobs = self.policy.logprobs(experience, plan.microbatches)


class EngineLogprobs(Stage):
    """Takes the engine's log-probs in place of the policy's (--use_engine_logprobs)."""

    reads = ("engine_logprobs",)
    writes = ("old_logprobs",)
    depends_on_samples_alone = True

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        plan.experience.old_logprobs = plan.experience.engine_logprobs


class ReferenceLogprobs(Stage):
    """Computes the log-probs of the frozen reference."""

    writes = ("reference_logprobs",)
    depends_on_samples_alone = True

    def __init__(self, policy: Policy):
        self.policy = policy

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        if plan.experience.reference_logprobs is None:
            plan.experience.reference_logprobs = self.policy.reference_logprobs(
                plan.experience, plan.microbatches
            )


class Values(Stage):
    """Computes the critic's value of each token."""

    writes = ("values",)
    depends_on_samples_alone = True

    def __init__(self, critic: Critic):
        self.critic = critic

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        if plan.experience.values is None:
            plan.experience.values = self.critic.values(plan.experience, plan.microbatches)


# -- advantages of tokens


class RewardToGo(Stage):
    """Sums the advantages of the rewards from each token on, discounted by gamma.

    The advantages of rewards are what the estimator made of them, less the penalty of
    --init_kl_coef.
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


def measure_values(experience: Experience, total: Sum, metrics: Metrics) -> None:
    """Measure the critic's values before the step, and how well they explain all ranks' returns."""
    learned = experience.loss_mask
    metrics.mean("critic/return", experience.returns, learned)
    explained = explained_variance(experience.values, experience.returns, learned, total)
    metrics.mean("critic/explained_variance", explained, explained.isfinite())
