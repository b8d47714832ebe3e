"""Options of the policy's loss, each a term that changes the losses of tokens.

Their order is in policy_objective(), objectives.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightrft.algorithms.correction import importance_ratios, kept_sequences, off_policy
from lightrft.algorithms.kl import EntropyCoefficient, KLCoefficient, generalized_jsd, k1, k3
from lightrft.config.errors import ConfigError
from lightrft.core.batch import Experience
from lightrft.core.losses import Report
from lightrft.core.objective import (
    EngineMismatch,
    PolicyInputs,
    Reach,
    Term,
    check_tokens,
    reach_of,
)


class TokenWeights(Term):
    """Multiplies the losses of tokens by the weights in the batch, if it has any."""

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> tuple[Tensor, Report]:
        weights = inputs.batch.weights
        return losses if weights is None else losses * weights, {}


class EngineCorrection(Term):
    """Weights tokens that the engine, or an older policy, sampled (--rollout_correction).

    The weights correct for the difference between the sampler's probabilities and the trainer's.
    """

    reads = ("engine_logprobs",)

    def __init__(self, correct: Callable[..., Tensor], name: str, level: str, **options: float):
        """Set up the correction `correct`; `name` is the user's name for it."""
        self.correct = correct
        self.label = f"--rollout_correction {name}: its weight"
        self.level = level
        self.options = options
        of_ratio = reach_of(correct)
        self.joined: Reach = "sequence" if of_ratio == "token" and level != "token" else of_ratio

    def reach(self, batch: Experience) -> Reach:
        # Given old log-probs make constants of all weights. Otherwise the current log-probs stand
        # for them, and a weight depends on those of its token or sequence.
        return "token" if batch.old_logprobs is not None else self.joined

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> tuple[Tensor, Report]:
        ratios = importance_ratios(inputs.old, inputs.batch, self.level)
        weights = self.correct(ratios, **self.options)
        check_tokens(self.label, weights, ratios, ConfigError)
        return losses * weights, {
            "engine/is_weight_mean": weights,
            "engine/is_weight_max": weights,
            "engine/is_weight_masked_share": weights != ratios,
        }


class SequenceMask(Term):
    """Leaves out sequences that the engine and the trainer see too differently (--rollout_mask)."""

    reads = ("engine_logprobs",)

    def __init__(self, level: str, low: float | None, high: float | None):
        self.bounds = level, low, high

    def reach(self, batch: Experience) -> Reach:
        return "token" if batch.old_logprobs is not None else "sequence"

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> tuple[Tensor, Report]:
        kept = kept_sequences(inputs.old, inputs.batch, *self.bounds)
        return torch.where(kept, losses, 0.0), {"engine/sequences_masked_share": ~kept}


class OffPolicyMask(Term):
    """Leaves out bad sequences that the current policy would hardly sample (--off_policy_delta)."""

    reads = ("engine_logprobs",)

    def __init__(self, delta: float):
        self.delta = delta

    def reach(self, batch: Experience) -> Reach:
        return "sequence"

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> tuple[Tensor, Report]:
        masked = off_policy(inputs.logprobs, inputs.advantages, inputs.batch, self.delta)
        return torch.where(masked, 0.0, losses), {"train/off_policy_masked_share": masked}


@dataclass(frozen=True)
class ReferenceDivergence(Term):
    """Reports the divergence from the reference, if the batch has its log-probs.

    With --use_kl_loss it is added to the losses too.
    """

    estimate: Callable[[Tensor, Tensor], Tensor]
    coefficient: KLCoefficient
    adds: bool

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> tuple[Tensor, Report]:
        reference = inputs.batch.reference_logprobs
        if reference is None:
            return losses, {}

        divergence = self.estimate(inputs.logprobs, reference)
        report = {
            "train/kl": divergence,
            "train/kl_k1": k1(inputs.logprobs, reference),
            "train/kl_k3": k3(inputs.logprobs, reference),
        }
        return losses + self.coefficient.value * divergence if self.adds else losses, report


@dataclass(frozen=True)
class TeacherDivergence(Term):
    """Adds the divergence from a teacher, over the candidates of each token (--distill_top_k)."""

    coefficient: float
    beta: float

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> tuple[Tensor, Report]:
        distance = generalized_jsd(inputs.values[:, 1:], inputs.batch.teacher_logprobs, self.beta)
        return losses + self.coefficient * distance, {"train/teacher_divergence": distance}


class EntropyBonus(Term):
    """Subtracts the entropy from the losses (--entropy_coef)."""

    reads = ("entropy",)

    def __init__(self, coefficient: EntropyCoefficient):
        self.coefficient = coefficient

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> tuple[Tensor, Report]:
        # An adapted coefficient is 0 while the entropy is high. Then the head need not compute the
        # gradient of the entropy.
        if self.coefficient.value:
            losses = losses - self.coefficient.value * inputs.batch.entropy
        return losses, {}


class CurrentMismatch(EngineMismatch):
    """The same report where the engine's log-probs are the old ones (--use_engine_logprobs).

    The trainer's are then the current ones, until an update has changed them.
    """

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> tuple[Tensor, Report]:
        if inputs.updates_before:
            return losses, {}
        return super().__call__(losses, replace(inputs, old=inputs.logprobs))
