"""Options of the policy's loss, each a term that changes the losses of tokens.

policy_objective() chooses the terms, in order, and the loss of policy_loss.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms import correction, kl
from lightrft.algorithms.means import means, weighted_by_branch
from lightrft.algorithms.options import options_of, resolve
from lightrft.algorithms.policy_loss import policy_losses
from lightrft.config.errors import ConfigError
from lightrft.config.sections import AlgorithmSection, needs_reference
from lightrft.core.batch import Experience
from lightrft.core.losses import (
    Denominator,
    Drift,
    EngineMismatch,
    PolicyInputs,
    PolicyLoss,
    PolicyObjective,
    Reach,
    Reported,
    Term,
    Weighted,
    check_tokens,
    reach_of,
)

DEPTHS = {"1k": 1024, "4k": 4096, "16k": 16384, "64k": 65536}
"""Depth of the context in names of metrics -> its first position."""
OBSERVATIONS = "observation_weights"
"""Column [T] float32: weight of each observation of an episode, with --observation_coef."""


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

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> Reported:
        ratios = correction.importance_ratios(inputs.old, inputs.batch, self.level)
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

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> Reported:
        kept = correction.kept_sequences(inputs.old, inputs.batch, *self.bounds)
        return torch.where(kept, losses, 0.0), {"engine/sequences_masked_share": ~kept}


class OffPolicyMask(Term):
    """Leaves out bad sequences that the current policy would hardly sample (--off_policy_delta)."""

    reads = ("engine_logprobs",)

    def __init__(self, delta: float):
        self.delta = delta

    def reach(self, batch: Experience) -> Reach:
        return "sequence"

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> Reported:
        masked = correction.off_policy(inputs.logprobs, inputs.advantages, inputs.batch, self.delta)
        return torch.where(masked, 0.0, losses), {"train/off_policy_masked_share": masked}


@dataclass(frozen=True)
class ReferenceDivergence(Term):
    """Reports the divergence from the reference, if the batch has its log-probs.

    With --use_kl_loss it is added to the losses too.
    """

    estimate: Callable[[Tensor, Tensor], Tensor]
    coefficient: kl.KLCoefficient
    adds: bool

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> Reported:
        reference = inputs.batch.reference_logprobs
        if reference is None:
            return losses, {}

        divergence = self.estimate(inputs.logprobs, reference)
        report = {
            "train/kl": divergence,
            "train/kl_k1": kl.k1(inputs.logprobs, reference),
            "train/kl_k3": kl.k3(inputs.logprobs, reference),
        }
        return losses + self.coefficient.value * divergence if self.adds else losses, report


@dataclass(frozen=True)
class TeacherDivergence(Term):
    """Adds the divergence from a teacher, over the candidates of each token (--distill_top_k)."""

    coefficient: float
    beta: float

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> Reported:
        distance = kl.generalized_jsd(
            inputs.values[:, 1:], inputs.batch.teacher_logprobs, self.beta
        )
        return losses + self.coefficient * distance, {"train/teacher_divergence": distance}


class EntropyBonus(Term):
    """Subtracts the entropy from the losses (--entropy_coef)."""

    reads = ("entropy",)

    def __init__(self, coefficient: kl.EntropyCoefficient):
        self.coefficient = coefficient

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> Reported:
        # An adapted coefficient is 0 while the entropy is high. Then the head need not compute the
        # gradient of the entropy.
        if self.coefficient.value:
            losses = losses - self.coefficient.value * inputs.batch.entropy
        return losses, {}


class CurrentMismatch(EngineMismatch):
    """The same report where the engine's log-probs are the old ones (--use_engine_logprobs).

    The trainer's are then the current ones, until an update has changed them.
    """

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> Reported:
        if inputs.updates_before:
            return losses, {}
        return super().__call__(losses, replace(inputs, old=inputs.logprobs))


class MeasuredObjective(PolicyObjective):
    """Reports also how far the engine is from the trainer deep in the context.

    `engine/logprob_mismatch_at_4k` is the mean over tokens from position 4,096 to 16,383.
    """

    def __call__(self, values: Tensor, batch: Experience, denominator: Denominator) -> Reported:
        loss, report = super().__call__(values, batch, denominator)
        difference = report.get("engine/logprob_mismatch")
        deepest = 0 if difference is None else int(batch.lengths.max())
        for (depth, begin), (_, end) in pairwise([*DEPTHS.items(), ("", deepest)]):
            if deepest > begin:
                within = (batch.position_ids >= begin) & (batch.position_ids < end)
                measured = Weighted(difference, within & batch.loss_mask)
                report[f"engine/logprob_mismatch_at_{depth}"] = measured
        return loss, report


class WithObservations(MeasuredObjective):
    """Adds the negative log-likelihood of observations, times their weights.

    The policy learns what its environment answers, but for tokens that it never samples. ECHO,
    arXiv 2605.24517.
    """

    def __call__(self, values: Tensor, batch: Experience, denominator: Denominator) -> Reported:
        loss, report = super().__call__(values, batch, denominator)
        weights = getattr(batch, OBSERVATIONS)
        logprobs = values if values.ndim == 1 else values[:, 0]
        observed = (weights > 0) & logprobs.isfinite()
        surprise = torch.where(observed, -logprobs, 0.0)
        report["train/observation_loss"] = Weighted(surprise.detach(), observed)
        return loss + (weights * surprise).sum(), report


COLUMNS = {"batch", *(field.name for field in fields(Experience))}
"""Options of a policy loss that come from the samples, not from the configuration."""


def policy_objective(
    section: AlgorithmSection,
    kl_coefficient: kl.KLCoefficient | None = None,
    entropy_coefficient: kl.EntropyCoefficient | None = None,
    *,
    longest: int = 0,
) -> PolicyObjective:
    """Build the policy gradient from the functions that the section names.

    Without a coefficient the section's own is used. `longest` is the largest number of tokens of a
    sequence. Raises ValueError for a function that does not
    exist or needs data that the run does not have.
    """
    loss = resolve(policy_losses, section.policy_loss, extra=COLUMNS)
    if ":" in section.policy_loss:
        loss = checked(loss, f"--policy_loss {section.policy_loss}")
    terms: list[Term] = []
    if name := section.rollout_correction:
        correct = resolve(correction.corrections, name)
        options = options_of(correct, section)
        terms.append(EngineCorrection(correct, name, section.rollout_correction_level, **options))
    if section.rollout_mask != "none":
        bounds = section.rollout_mask_low, section.rollout_mask_high
        terms.append(SequenceMask(section.rollout_mask, *bounds))
    if section.off_policy_delta is not None:
        terms.append(OffPolicyMask(section.off_policy_delta))

    # Corrections come first: penalties and bonuses belong to the current policy.
    if needs_reference(section):
        estimate = kl.kl_estimators[section.kl_estimator]
        coefficient = kl_coefficient or kl.KLCoefficient(section.init_kl_coef)
        terms.append(ReferenceDivergence(estimate, coefficient, adds=section.use_kl_loss))
    if section.distill_top_k:
        terms.append(TeacherDivergence(section.distill_coef, section.distill_beta))
    if section.entropy_coef or section.entropy_target is not None:
        bonus = entropy_coefficient or kl.EntropyCoefficient(section.entropy_coef)
        terms.append(EntropyBonus(bonus))
    terms += [Drift(), CurrentMismatch() if section.use_engine_logprobs else EngineMismatch()]

    mean = means[section.loss_agg_mode]
    if section.branch_weight == "episode":
        mean = weighted_by_branch(mean)
    kind = MeasuredObjective if longest > DEPTHS["1k"] else PolicyObjective
    if section.observation_coef:
        kind = WithObservations
    return kind(loss, terms, mean=mean, **options_of(loss, section))


def checked(loss: PolicyLoss, flag: str) -> PolicyLoss:
    """Return a user's own loss, and refuse what is not one value for each token."""

    @wraps(loss)
    def call(logprobs: Tensor, *args: Tensor, **options: Any) -> Reported:
        result = loss(logprobs, *args, **options)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ConfigError(
                f"{flag} must return a pair: the losses of tokens, and a dictionary to report"
            )

        losses, report = result
        for name, values in report.items():
            check_tokens(f"{flag}: the reported {name!r}", values, logprobs, ConfigError)
        check_tokens(f"{flag}: its loss", losses, logprobs, ConfigError)
        return result

    return call
