"""Compute what the models say about the samples before the step.

These outputs depend on each sample alone, so they can be computed before other samples are complete
(--overlap). An experience that already has them is left as it is.
"""

from lightrft.observe.metrics import Metrics
from lightrft.roles.critic import Critic
from lightrft.roles.policy import Policy
from lightrft.rollout.plan import Stage, TrainingPlan


class PolicyLogprobs(Stage):
    """Computes the policy's log-probs before the update, and the entropy if a later stage needs it.

    With a single update they equal the log-probs of the update itself, so they are computed only if
    a stage `needs` them.
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
        elif experience.old_logprobs is None and (self.needed or plan.num_updates > 1):
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
