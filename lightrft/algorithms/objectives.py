"""Training objectives: from the log-probs of one micro-batch to its share of the global loss.

An objective is called with the values of a role, the batch, and the denominator of the whole
optimizer step. PolicyObjective is the one of PPO, GRPO and the like; the losses that it chooses
from are in policy_loss.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.algorithms.balance import Balance
from lightrft.algorithms.correction import (
    OF_RATIO,
    corrections,
    importance_ratios,
    kept_sequences,
    off_policy,
)
from lightrft.algorithms.kl import (
    EntropyCoefficient,
    KLCoefficient,
    generalized_jsd,
    k1,
    k3,
    kl_estimators,
)
from lightrft.algorithms.options import options_of, resolve
from lightrft.algorithms.policy_loss import PolicyLoss, policy_losses, reach
from lightrft.algorithms.preferences.dpo import DPOObjective
from lightrft.algorithms.preferences.kto import KTOObjective
from lightrft.config.errors import ConfigError
from lightrft.config.sections import AlgorithmSection
from lightrft.core.batch import Batch, Experience
from lightrft.core.reduce import Denominator, LocalGradients, Report, share_of_mean
from lightrft.core.table import keywords

LOSS_INPUTS = {"batch", "marked"}
"""Options of a policy loss that come from the samples, not from the configuration."""

DRIFT = ("train/drift_k1", "train/drift_k3")
"""Names of the reports of drift()."""


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Inputs of the terms of the policy's loss.

    The first three are 0 for tokens that are not learned.
    """

    logprobs: Tensor
    """Log-probs of the tokens under the actor, [T] with gradient."""
    old: Tensor
    """The same before the step, [T]."""
    advantages: Tensor
    all_logprobs: Tensor
    """What the actor returned: `logprobs`, or [T, 1 + K] with the candidates too."""
    batch: Experience


Term = Callable[[Tensor, PolicyInputs], tuple[Tensor, Report]]
"""(losses of tokens [T], inputs) -> the new losses [T], and reports."""


class PolicyObjective:
    """The policy gradient: a weighted loss of the ratio, the KL penalty and the entropy bonus."""

    def __init__(
        self,
        section: AlgorithmSection,
        kl_coefficient: KLCoefficient | None = None,
        entropy_coefficient: EntropyCoefficient | None = None,
    ):
        """Look up the functions that the section names.

        Without a coefficient the section's own is used. Raises ValueError for a function that
        does not exist or needs data that the run does not have.
        """
        self.section = section
        self.kl_coefficient = kl_coefficient or KLCoefficient(section.init_kl_coef)
        self.entropy_coefficient = entropy_coefficient or EntropyCoefficient(section.entropy_coef)
        self.policy_loss: PolicyLoss = resolve(
            policy_losses, section.policy_loss, extra=LOSS_INPUTS
        )
        self.reach = reach(self.policy_loss)
        self.options = options_of(self.policy_loss, section)
        self.given = keywords(self.policy_loss).keys() & LOSS_INPUTS
        self.needed = ["advantages", "engine_logprobs"]
        """Columns that a batch must have."""
        if "marked" in self.given:
            self.needed.append("marked")
        self.correction = section.rollout_correction and resolve(
            corrections, section.rollout_correction
        )

        self.kl = kl_estimators[section.kl_estimator]
        self.corrections = self._chosen_corrections()
        """Terms that correct the losses of tokens for the difference of engine and trainer."""
        self.penalties: list[Term] = [self._teacher_divergence] if section.distill_top_k else []
        """Terms that add to the losses of tokens."""

    def _chosen_corrections(self) -> "list[Term]":
        chosen: list[Term] = []
        if self.correction:
            chosen.append(self._correct)
        if self.section.rollout_mask != "none":
            chosen.append(self._mask_sequences)
        if self.section.off_policy_delta is not None:
            chosen.append(self._mask_off_policy)
        return chosen

    def __call__(
        self, logprobs: Tensor, batch: Experience, denominator: Denominator
    ) -> tuple[Tensor, Report]:
        """Compute the loss [] and reports [T] from the actor's log-probs.

        They are [T], or [T, 1 + K]: of the tokens themselves, then of K candidates for a teacher.
        Without `old_logprobs` the actor has not changed since the step began, so the ratio is 1 and
        only the gradient counts.
        """
        section = self.section
        needed = [*self.needed, *(["entropy"] if self.entropy_coefficient.value else [])]
        missing = [name for name in needed if getattr(batch, name) is None]
        if missing:
            raise ValueError(f"the policy gradient needs {', '.join(missing)} in the batch")

        learned = batch.loss_mask
        all_logprobs = logprobs
        if all_logprobs.ndim > 1:
            logprobs = all_logprobs[:, 0]
        # Tokens that are not learned may hold anything, also infinities, and 0 times infinity is
        # NaN.
        logprobs = torch.where(learned, logprobs, 0.0)
        if batch.old_logprobs is None:
            old = logprobs.detach()
        else:
            old = torch.where(learned, batch.old_logprobs, 0.0)
        advantages = torch.where(learned, batch.advantages, 0.0)
        inputs = PolicyInputs(logprobs, old, advantages, all_logprobs, batch)
        values, report = self._losses(inputs)
        if batch.weights is not None:
            values = values * batch.weights

        for correct in self.corrections:
            values, more = correct(values, inputs)
            report = report | more

        if batch.reference_logprobs is not None:
            divergence = report["train/kl"] = self.kl(logprobs, batch.reference_logprobs)
            report |= {
                "train/kl_k1": k1(logprobs, batch.reference_logprobs),
                "train/kl_k3": k3(logprobs, batch.reference_logprobs),
            }
            if section.use_kl_loss:
                values = values + self.kl_coefficient.value * divergence

        for add in self.penalties:
            values, more = add(values, inputs)
            report = report | more

        if self.entropy_coefficient.value:
            values = values - self.entropy_coefficient.value * batch.entropy
        if "train/ratio" in report:
            report |= dict.fromkeys(("train/ratio_min", "train/ratio_max"), report["train/ratio"])
        # Without old log-probs the policy has not changed since it sampled.
        if batch.old_logprobs is None:
            report |= dict.fromkeys(DRIFT, torch.zeros_like(old))
        else:
            report |= drift(logprobs, old)
        # With --use_engine_logprobs `old` comes from the engine. The trainer's are then the current
        # ones, until an update has changed them.
        if not section.use_engine_logprobs:
            report |= mismatch(old, batch.engine_logprobs)
        elif not denominator.updates_before:
            report |= mismatch(logprobs, batch.engine_logprobs)

        return share_of_mean(values, batch, section.loss_agg_mode, denominator), report

    def num_sequences(self, batch: Experience) -> int | None:
        """Return how many sequences determine a token's gradient; see LocalGradients.

        None means that it may depend on the whole batch.
        """
        section = self.section
        if self.reach == "batch":
            return None

        of_loss = int(self.reach == "sequence" or section.off_policy_delta is not None)
        # Given old log-probs make constants of all corrections. Otherwise the current log-probs
        # stand for them, and a correction depends on those of its token or sequence.
        if batch.old_logprobs is not None:
            return of_loss
        if self.correction and section.rollout_correction not in OF_RATIO:
            return None

        of_sequence = section.rollout_mask != "none" or (
            self.correction and section.rollout_correction_level != "token"
        )
        return 1 if of_sequence else of_loss

    def _losses(self, inputs: "PolicyInputs") -> tuple[Tensor, Report]:
        batch = inputs.batch
        given = {"batch": batch, "marked": batch.marked}
        arguments = self.options | {name: given[name] for name in self.given}
        result = self.policy_loss(inputs.logprobs, inputs.old, inputs.advantages, **arguments)
        flag = f"--policy_loss {self.section.policy_loss}"
        if not isinstance(result, tuple) or len(result) != 2:
            raise ConfigError(
                f"{flag} must return a pair: the losses of tokens, and a dictionary to report"
            )

        losses, report = result
        for name, values in report.items():
            _of_tokens(f"{flag}: the reported {name!r}", values, inputs.logprobs)
        return _of_tokens(f"{flag}: its loss", losses, inputs.logprobs), report

    def _correct(self, values: Tensor, inputs: "PolicyInputs") -> tuple[Tensor, Report]:
        """Weight tokens that the engine, or an older policy, sampled.

        The weights correct for the difference between the sampler's probabilities and the
        trainer's.
        """
        batch = inputs.batch
        ratios = importance_ratios(
            inputs.old, batch.engine_logprobs, batch, self.section.rollout_correction_level
        )
        weights = self.correction(ratios, **options_of(self.correction, self.section))
        weights = _of_tokens(
            f"--rollout_correction {self.section.rollout_correction}: its weight", weights, ratios
        )

        return values * weights, {
            "engine/is_weight_mean": weights,
            "engine/is_weight_max": weights,
            "engine/is_weight_masked_share": weights != ratios,
        }

    def _mask_sequences(self, values: Tensor, inputs: "PolicyInputs") -> tuple[Tensor, Report]:
        """Leave out sequences that the engine and the trainer see too differently."""
        section = self.section
        batch = inputs.batch
        bounds = section.rollout_mask, section.rollout_mask_low, section.rollout_mask_high
        kept = kept_sequences(inputs.old, batch.engine_logprobs, batch, *bounds)
        return torch.where(kept, values, 0.0), {"engine/sequences_masked_share": ~kept}

    def _mask_off_policy(self, values: Tensor, inputs: "PolicyInputs") -> tuple[Tensor, Report]:
        """Leave out bad sequences that the current policy would hardly sample."""
        batch = inputs.batch
        masked = off_policy(
            inputs.logprobs,
            batch.engine_logprobs,
            inputs.advantages,
            batch,
            self.section.off_policy_delta,
        )
        return torch.where(masked, 0.0, values), {"train/off_policy_masked_share": masked}

    def _teacher_divergence(self, values: Tensor, inputs: "PolicyInputs") -> tuple[Tensor, Report]:
        """Add the divergence from a teacher, over the candidates of each token."""
        section = self.section
        distance = generalized_jsd(
            inputs.all_logprobs[:, 1:], inputs.batch.teacher_logprobs, section.distill_beta
        )
        return values + section.distill_coef * distance, {"train/teacher_divergence": distance}


def _of_tokens(label: str, values: Tensor, like: Tensor) -> Tensor:
    """Check that there is one value for each token.

    A scalar would be broadcast over all tokens and change the meaning of the loss.
    """
    shape = list(values.shape) if isinstance(values, Tensor) else []
    if shape != list(like.shape):
        raise ConfigError(
            f"{label} has shape {shape}, not one value for each of the {len(like)} tokens"
        )
    return values


def drift(logprobs: Tensor, old_logprobs: Tensor) -> Report:
    """Report how far the current policy is from the sampling policy, the one before the step.

    [T], [T] -> [T] each.
    """
    now = logprobs.detach()
    return dict(zip(DRIFT, (k1(old_logprobs, now), k3(old_logprobs, now)), strict=True))


def mismatch(trainer_logprobs: Tensor, engine_logprobs: Tensor) -> Report:
    """Report how far the engine's log-probs are from the trainer's, for the same weights.

    [T], [T] -> [T] each.
    """
    difference = (trainer_logprobs - engine_logprobs).detach().abs()
    return {
        "engine/logprob_mismatch": difference,
        "engine/logprob_mismatch_max": difference,
        "engine/logprob_mismatch_exp": torch.exp(difference),
    }


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

        return share_of_mean(loss / 2, batch, "token-mean", denominator), report


def sft(logprobs: Tensor, batch: Batch, denominator: Denominator) -> tuple[Tensor, Report]:
    """Compute the negative log-likelihood [] from log-probs [T].

    It is the mean over all learned tokens of the optimizer step.
    """
    return share_of_mean(-logprobs, batch, "token-mean", denominator), {}


class PtxObjective:
    """A supervised loss next to another loss: sft() times a coefficient.

    PPO-ptx: Ouyang et al., arXiv 2203.02155, equation 2.
    """

    def __init__(self, coefficient: float):
        self.coefficient = coefficient

    def __call__(
        self, logprobs: Tensor, batch: Batch, denominator: Denominator
    ) -> tuple[Tensor, Report]:
        loss, _ = sft(logprobs, batch, denominator)
        return self.coefficient * loss, {"train/ptx_loss": -logprobs}


class PtxDivergence:
    """A teacher's distributions over given answers next to another loss: the part of GKD with data.

    Agarwal et al., arXiv 2306.13649, algorithm 1; the share of data is the coefficient here.
    """

    def __init__(self, coefficient: float, beta: float):
        self.coefficient = coefficient
        self.beta = beta

    def __call__(
        self, logprobs: Tensor, batch: Batch, denominator: Denominator
    ) -> tuple[Tensor, Report]:
        """Compute the mean of generalized_jsd() over answer tokens, from log-probs [T, 1 + K]."""
        values = generalized_jsd(logprobs[:, 1:], batch.teacher_logprobs, self.beta)
        loss = share_of_mean(values, batch, "token-mean", denominator)
        return self.coefficient * loss, {"train/ptx_divergence": values}


class Balanced:
    """Another objective plus the load-balancing loss of experts times a coefficient."""

    def __init__(
        self, objective: Callable[..., tuple[Tensor, Report]], balance: Balance, coefficient: float
    ):
        self.objective = objective
        self.balance = balance
        self.coefficient = coefficient

    def __call__(
        self, logprobs: Tensor, batch: Batch, denominator: Denominator
    ) -> tuple[Tensor, Report]:
        loss, report = self.objective(logprobs, batch, denominator)
        report |= {"train/aux_loss": self.balance.loss.expand(len(logprobs))}
        return loss + self.coefficient * self.balance.share(batch.routing), report


# -- gradients that are known early


def local_gradients(
    objective: Callable[..., tuple[Tensor, Report]], batch: Batch, denominator: Denominator
) -> LocalGradients | None:
    """Return the gradients of an objective that treats tokens, sequences or pairs alone.

    Return None for any other objective.
    """
    match objective:
        case Balanced():
            return local_gradients(objective.objective, batch, denominator)
        case PolicyObjective():
            num_sequences = objective.num_sequences(batch)
        case KTOObjective():
            num_sequences = 1
        case DPOObjective():
            num_sequences = 2
        case _:
            of_tokens = objective is sft or isinstance(objective, PtxObjective | PtxDivergence)
            num_sequences = 0 if of_tokens else None
    if num_sequences is None:
        return None

    def gradients(logprobs: Tensor, entropy: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        # Detached leaves: the graph ends at the log-probs, so no gradient runs back into the model
        # here.
        inputs = [
            value.detach().requires_grad_() for value in (logprobs, entropy) if value is not None
        ]
        batch.entropy = None if entropy is None else inputs[1]
        with torch.enable_grad():
            loss, _ = objective(inputs[0], batch, denominator)
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        return grads[0], None if entropy is None else grads[1]

    return LocalGradients(gradients, num_sequences)
