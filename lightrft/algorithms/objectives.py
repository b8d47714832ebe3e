"""Training objectives: from the log-probs of one micro-batch to its share of the global loss.

An objective is called with the values of a role, the batch, and the denominator of the whole
optimizer step. `reach` says what determines the gradient of a token. policy_objective() builds the
one of PPO, GRPO and the like from the losses in policy_loss.py and the options in terms.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms.balance import Balance
from lightrft.algorithms.correction import corrections
from lightrft.algorithms.kl import EntropyCoefficient, KLCoefficient, generalized_jsd, kl_estimators
from lightrft.algorithms.means import means
from lightrft.algorithms.options import options_of, resolve
from lightrft.algorithms.policy_loss import policy_losses
from lightrft.algorithms.terms import (
    CurrentMismatch,
    EngineCorrection,
    EntropyBonus,
    OffPolicyMask,
    ReferenceDivergence,
    SequenceMask,
    TeacherDivergence,
    TokenWeights,
)
from lightrft.config.errors import ConfigError
from lightrft.config.sections import AlgorithmSection
from lightrft.core.batch import Batch, Experience
from lightrft.core.losses import Denominator, PolicyLoss, Report, token_mean
from lightrft.core.objective import (
    Drift,
    EngineMismatch,
    PolicyObjective,
    Term,
    by_token,
    check_tokens,
)

COLUMNS = {"batch", *(field.name for field in fields(Experience))}
"""Options of a policy loss that come from the samples, not from the configuration."""


def policy_objective(
    section: AlgorithmSection,
    kl_coefficient: KLCoefficient | None = None,
    entropy_coefficient: EntropyCoefficient | None = None,
) -> PolicyObjective:
    """Build the policy gradient from the functions that the section names.

    Without a coefficient the section's own is used. Raises ValueError for a function that does not
    exist or needs data that the run does not have.
    """
    loss = resolve(policy_losses, section.policy_loss, extra=COLUMNS)
    if ":" in section.policy_loss:
        loss = checked(loss, f"--policy_loss {section.policy_loss}")
    terms: list[Term] = [TokenWeights()]
    if name := section.rollout_correction:
        correct = resolve(corrections, name)
        options = options_of(correct, section)
        terms.append(EngineCorrection(correct, name, section.rollout_correction_level, **options))
    if section.rollout_mask != "none":
        bounds = section.rollout_mask_low, section.rollout_mask_high
        terms.append(SequenceMask(section.rollout_mask, *bounds))
    if section.off_policy_delta is not None:
        terms.append(OffPolicyMask(section.off_policy_delta))

    # Corrections come first: penalties and bonuses belong to the current policy.
    terms.append(
        ReferenceDivergence(
            kl_estimators[section.kl_estimator],
            kl_coefficient or KLCoefficient(section.init_kl_coef),
            adds=section.use_kl_loss,
        )
    )
    if section.distill_top_k:
        terms.append(TeacherDivergence(section.distill_coef, section.distill_beta))
    if section.entropy_coef or section.entropy_target is not None:
        bonus = entropy_coefficient or EntropyCoefficient(section.entropy_coef)
        terms.append(EntropyBonus(bonus))
    mismatch = CurrentMismatch if section.use_engine_logprobs else EngineMismatch

    return PolicyObjective(
        loss,
        [*terms, Drift(), mismatch()],
        mean=means[section.loss_agg_mode],
        **options_of(loss, section),
    )


def checked(loss: PolicyLoss, flag: str) -> PolicyLoss:
    """Return a user's own loss, and refuse what is not one value for each token."""

    @wraps(loss)
    def call(logprobs: Tensor, *args: Tensor, **options: Any) -> tuple[Tensor, Report]:
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


# -- other objectives


class ValueObjective:
    """Objective of the critic: clipped squared distance to the returns."""

    def __init__(self, section: AlgorithmSection):
        self.section = section

    def __call__(
        self, values: Tensor, batch: Experience, denominator: Denominator
    ) -> tuple[Tensor, Report]:
        """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2, mean over all learned tokens.

        The mean is over the optimizer step. values [T]; returns [] and reports [T]. The clip is
        part of the implementation of PPO (Schulman et al., arXiv 1707.06347); Engstrom et al.,
        arXiv 2005.12729, describe it.
        """
        missing = [name for name in ("values", "returns") if getattr(batch, name) is None]
        if missing:
            raise ValueError(f"the value loss needs {', '.join(missing)} in the batch")

        loss = (values - batch.returns).square()
        reach = self.section.value_clip
        report = {"critic/value": values}
        if reach:
            change = values - batch.values
            near = torch.where(change.abs() > reach, batch.values + reach * change.sign(), values)
            clipped_loss = (near - batch.returns).square()
            report["critic/clip"] = clipped_loss > loss
            loss = torch.max(loss, clipped_loss)

        return token_mean(loss / 2, batch, denominator), report


def sft(logprobs: Tensor, batch: Batch, denominator: Denominator) -> tuple[Tensor, Report]:
    """Compute the negative log-likelihood [] from log-probs [T].

    It is the mean over all learned tokens of the optimizer step.
    """
    return token_mean(-logprobs, batch, denominator), {}


sft.reach = by_token


@dataclass(frozen=True)
class PtxObjective:
    """A supervised loss on given answers next to another loss, times a coefficient.

    PPO-ptx: Ouyang et al., arXiv 2203.02155, equation 2. With `beta` the loss is the divergence
    from a teacher's distributions over the answers, the part of GKD with data: Agarwal et al.,
    arXiv 2306.13649, algorithm 1; the share of data is the coefficient here.
    """

    coefficient: float
    beta: float | None = None

    reach = staticmethod(by_token)

    def __call__(
        self, logprobs: Tensor, batch: Batch, denominator: Denominator
    ) -> tuple[Tensor, Report]:
        """Compute the mean over answer tokens, from log-probs [T], or [T, 1 + K] with a teacher."""
        name = "train/ptx_loss"
        values = -logprobs
        if self.beta is not None:
            name = "train/ptx_divergence"
            values = generalized_jsd(logprobs[:, 1:], batch.teacher_logprobs, self.beta)
        return self.coefficient * token_mean(values, batch, denominator), {name: values}


class Balanced:
    """Another objective plus the load-balancing loss of experts times a coefficient."""

    def __init__(
        self, objective: Callable[..., tuple[Tensor, Report]], balance: Balance, coefficient: float
    ):
        self.of_logprobs = objective
        self.balance = balance
        self.coefficient = coefficient

    def __call__(
        self, logprobs: Tensor, batch: Batch, denominator: Denominator
    ) -> tuple[Tensor, Report]:
        loss, report = self.of_logprobs(logprobs, batch, denominator)
        report |= {"train/aux_loss": self.balance.loss.expand(len(logprobs))}
        return loss + self.coefficient * self.balance.share(batch.routing), report
