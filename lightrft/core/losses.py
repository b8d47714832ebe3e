"""The policy gradient: a loss of each token, terms that change it, and the mean.

A loss takes the log-probs of the actor now and before the step, and advantages, [T] each, and
returns values [T] and reports [T]. r = exp(logp - old). Its keyword-only parameters are options, or
columns of the batch, or the `batch` itself.

The denominator counts the whole optimizer step, over all ranks and micro-batches, so the sum of all
shares is the same for every way of splitting the step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from lightrft.core.batch import Batch, Experience
from lightrft.core.table import checked_options, keywords

Sum = Callable[[Tensor], Tensor]
"""Function that returns the sum of a tensor over all ranks."""
Report = dict[str, Any]
"""Metric name -> values [T] to average over learned tokens, or Weighted; `_max`, `_min` take the
extreme."""
Reported = tuple[Tensor, Report]
"""Values, and what to report about them."""
PolicyLoss = Callable[..., Reported]


class Weighted(NamedTuple):
    """Values to report, with a weight for each in the mean; both have the same shape."""

    values: Tensor
    weight: Tensor


def ppo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    eps_clip_low: float = 0.2,
    eps_clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Reported:
    """-min(r A, clip(r, 1 - low, 1 + high) A).

    Schulman et al., arXiv 1707.06347, equation 7; different bounds below and above: DAPO, arXiv
    2503.14476, equation 10. With `dual_clip` c the loss of a negative advantage is at most -c A: Ye
    et al., arXiv 1912.09729, equation 5.
    """
    ratio = (logprobs - old).exp()
    loss, report = clipped_surrogate(
        ratio, ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high), advantages
    )
    if dual_clip is not None:
        bound = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        report["train/clip_dual"] = loss > bound
        loss = torch.min(loss, bound)
    return loss, report


def gspo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    batch: Batch,
    eps_clip_low: float = 0.2,
    eps_clip_high: float = 0.2,
) -> Reported:
    """ppo with one ratio for a whole sequence: s = exp(mean of log r over the tokens).

    GSPO, arXiv 2507.18071.
    """
    ratio = sequence_means(logprobs - old, batch).exp()[batch.sequence_ids]
    return clipped_surrogate(ratio, ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high), advantages)


def reinforce(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Reported:
    """-A logp.

    Williams, Machine Learning 8, 1992. Changes of the policy since the samples were drawn are not
    corrected.
    """
    return -advantages * logprobs, {"train/ratio": (logprobs - old).exp()}


def clipped_surrogate(ratio: Tensor, bounded: Tensor, advantages: Tensor) -> Reported:
    """-min(r A, b A), with the bounded ratio b; report where b counts."""
    plain_loss = -ratio * advantages
    clipped_loss = -bounded * advantages
    report = {
        "train/ratio": ratio,
        "train/clip_low": (clipped_loss > plain_loss) & (advantages < 0),
        "train/clip_high": (clipped_loss > plain_loss) & (advantages > 0),
    }
    return torch.max(plain_loss, clipped_loss), report


# -- from tokens to a scalar


@dataclass(frozen=True, slots=True)
class Denominator:
    """Counts of the optimizer step, over all ranks."""

    tokens: Tensor
    """Number of learned tokens, [] float32."""
    sequences: Tensor
    """Number of sequences with at least one learned token, [] float32."""
    updates_before: int = 0
    """Number of optimizer steps that have used the samples before this one."""
    mean_counts: Any = None
    """Counts of another way to take the mean; see Mean."""


Mean = Callable[[Tensor, Batch, Denominator], Tensor]
"""(values [T], batch, denominator) -> this micro-batch's share of the global mean: [] float32."""


def token_mean(values: Tensor, batch: Batch, denominator: Denominator) -> Tensor:
    """Sum over tokens / all tokens (DAPO, arXiv 2503.14476)."""
    return torch.where(batch.loss_mask, values, 0.0).sum() / denominator.tokens.clamp(min=1)


def sequence_mean(values: Tensor, batch: Batch, denominator: Denominator) -> Tensor:
    """Mean per sequence, then over sequences (GRPO, arXiv 2402.03300)."""
    return sequence_means(values, batch).sum() / denominator.sequences.clamp(min=1)


def sequence_sums(values: Tensor, batch: Batch) -> Tensor:
    """Return the sum of `values` [T] over each sequence: [N]."""
    return values.new_zeros(len(batch)).index_add(0, batch.sequence_ids, values)


def sequence_means(values: Tensor, batch: Batch) -> Tensor:
    """Return the mean of `values` [T] over the learned tokens of each sequence: [N].

    A sequence without learned tokens has 0.
    """
    lengths = sequence_sums(batch.loss_mask.to(values.dtype), batch).clamp(min=1)
    return sequence_sums(torch.where(batch.loss_mask, values, 0.0), batch) / lengths


# -- the objective of an optimizer step


Reach = Literal["token", "sequence", "batch"]
"""What determines the gradient of a token: its own log-probs, its sequence's, or everything."""
REACHES: Sequence[Reach] = ("token", "sequence", "batch")


def reach_of(function: Callable[..., Any]) -> Reach:
    """Return what the result of a token depends on, as the property `per` of a function says.

    Without it nothing is known, so it is the batch. Raises ValueError for another word.
    """
    per = getattr(function, "properties", {}).get("per", "batch")
    if per not in REACHES:
        raise ValueError(f"{function}: per={per!r} is none of {', '.join(REACHES)}")
    return per


def by_token(batch: Batch) -> Reach:
    """Return "token": the `reach` of an objective that treats each token alone."""
    return "token"


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Inputs of the terms of the loss. The first three are 0 for tokens that are not learned."""

    logprobs: Tensor
    """Log-probs of the tokens under the actor, [T] with gradient."""
    old: Tensor
    """The same before the step, [T]."""
    advantages: Tensor
    values: Tensor
    """What the actor returned: `logprobs`, or [T, 1 + K] with other candidates too."""
    batch: Experience
    updates_before: int
    """Number of optimizer steps that have used the samples before this one."""


class Term(ABC):
    """One entry of the loss: a correction, a penalty, a bonus, or reports alone.

    A term that reads the column `entropy` gets it with gradient, as `inputs.batch.entropy`.
    """

    reads: Sequence[str] = ()
    """Columns that the batch must have."""

    def reach(self, batch: Experience) -> Reach:
        """Return what determines the change of a token's gradient; a token alone if not told."""
        return "token"

    @abstractmethod
    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> Reported:
        """Return the new losses of tokens, [T] as before, and reports [T]."""


class PolicyObjective:
    """The loss of tokens, times their weights, then each term in order, then the mean.

    PolicyObjective(ppo, eps_clip_high=0.28)
    """

    def __init__(
        self,
        loss: PolicyLoss,
        terms: Sequence[Term] | None = None,
        *,
        mean: Mean = token_mean,
        **options: Any,
    ):
        """Set up the objective; `options` are parameters of the loss.

        `terms` replace the default ones, Drift() and EngineMismatch(). Raises ValueError for a loss
        whose property `per` is unknown, and for an option that the loss does not name.
        """
        self.loss = loss
        self.terms = [Drift(), EngineMismatch()] if terms is None else terms
        self.mean = mean
        self.options = checked_options(loss, options)
        self.loss_reach: Reach = reach_of(loss)
        required = [name for name, needed in keywords(loss).items() if needed]
        self.columns = [name for name in required if name not in self.options]
        """What the loss reads of the batch: columns, or the `batch` itself."""
        self.needed = [
            "advantages",
            *(name for name in self.columns if name != "batch"),
            *(name for term in self.terms for name in term.reads),
        ]

    def reach(self, batch: Experience) -> Reach:
        """Return what determines the gradient of a token."""
        reaches: list[Reach] = [self.loss_reach, *(term.reach(batch) for term in self.terms)]
        return max(reaches, key=REACHES.index)

    def __call__(self, values: Tensor, batch: Experience, denominator: Denominator) -> Reported:
        """Compute the loss [] and reports [T] from what the actor returned, [T] or [T, 1 + K].

        Without `old_logprobs` the actor has not changed since the step began, so the ratio is 1 and
        only the gradient counts. Raises ValueError if the batch lacks a column.
        """
        missing = [name for name in self.needed if getattr(batch, name, None) is None]
        if missing:
            raise ValueError(f"the policy gradient needs {', '.join(missing)} in the batch")

        learned = batch.loss_mask
        # Tokens that are not learned may hold infinities, and 0 times infinity is NaN.
        logprobs = torch.where(learned, values if values.ndim == 1 else values[:, 0], 0.0)
        before = batch.old_logprobs
        old = logprobs.detach() if before is None else torch.where(learned, before, 0.0)
        advantages = torch.where(learned, cast(Tensor, batch.advantages), 0.0)
        inputs = PolicyInputs(logprobs, old, advantages, values, batch, denominator.updates_before)

        read = {name: batch if name == "batch" else getattr(batch, name) for name in self.columns}
        losses, report = self.loss(logprobs, old, advantages, **self.options, **read)
        check_tokens("the loss", losses, logprobs)
        if batch.weights is not None:
            losses = losses * batch.weights
        for term in self.terms:
            losses, term_report = term(losses, inputs)
            report = report | term_report
        for name, reported in {"the loss": losses, **report}.items():
            check_tokens(name, reported, logprobs)

        if "train/ratio" in report:
            report |= dict.fromkeys(("train/ratio_min", "train/ratio_max"), report["train/ratio"])
        return self.mean(losses, batch, denominator), report


def check_tokens(
    label: str, values: Any, like: Tensor, error: type[ValueError] = ValueError
) -> None:
    """Raise an error for anything but one value per token: it would change the loss's meaning."""
    shape = list(values.shape) if isinstance(values, Tensor) else []
    if shape != list(like.shape):
        raise error(f"{label} has shape {shape}, not one value for each of the {len(like)} tokens")


class Drift(Term):
    """Reports how far the policy is from the one before the step: k1 and k3 of the divergence."""

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> Reported:
        now = inputs.logprobs.detach()
        change = now - inputs.old
        # exp(d) - 1 of a small d loses its digits, and the result its sign.
        k3 = change.expm1() - change
        return losses, {"train/drift_k1": inputs.old - now, "train/drift_k3": k3}


class EngineMismatch(Term):
    """Reports how far the engine's log-probs are from the trainer's, for the same weights."""

    reads = ("engine_logprobs",)

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> Reported:
        difference = (inputs.old - inputs.batch.engine_logprobs).detach().abs()
        return losses, {
            "engine/logprob_mismatch": difference,
            "engine/logprob_mismatch_max": difference,
            "engine/logprob_mismatch_exp": torch.exp(difference),
        }
