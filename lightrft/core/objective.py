"""The policy gradient: a loss of each token, terms that change it, and the mean."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightrft.core.batch import Batch, Experience
from lightrft.core.losses import Denominator, Mean, PolicyLoss, Report, token_mean
from lightrft.core.table import chosen, keywords

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
    """One entry of the loss: a correction, a penalty, a bonus, or reports alone."""

    reads: Sequence[str] = ()
    """Columns that the batch must have."""

    def reach(self, batch: Experience) -> Reach:
        """Return what determines the change of a token's gradient; a token alone if not told."""
        return "token"

    @abstractmethod
    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> tuple[Tensor, Report]:
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
        """Set up the objective; `options` are parameters of the loss, and it takes what it names.

        Raises ValueError for a loss whose property `per` is unknown.
        """
        self.loss = loss
        self.terms = [Drift(), EngineMismatch()] if terms is None else terms
        self.mean = mean
        self.options = chosen(loss, options)
        self.loss_reach = reach_of(loss)
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
        reaches = [self.loss_reach, *(term.reach(batch) for term in self.terms)]
        return max(reaches, key=REACHES.index)

    def __call__(
        self, values: Tensor, batch: Experience, denominator: Denominator
    ) -> tuple[Tensor, Report]:
        """Compute the loss [] and reports [T] from what the actor returned, [T] or [T, 1 + K].

        Without `old_logprobs` the actor has not changed since the step began, so the ratio is 1 and
        only the gradient counts. Raises ValueError if the batch lacks a column.
        """
        missing = [name for name in self.needed if getattr(batch, name) is None]
        if missing:
            raise ValueError(f"the policy gradient needs {', '.join(missing)} in the batch")

        learned = batch.loss_mask
        # Tokens that are not learned may hold infinities, and 0 times infinity is NaN.
        logprobs = torch.where(learned, values if values.ndim == 1 else values[:, 0], 0.0)
        before = batch.old_logprobs
        old = logprobs.detach() if before is None else torch.where(learned, before, 0.0)
        advantages = torch.where(learned, batch.advantages, 0.0)
        inputs = PolicyInputs(logprobs, old, advantages, values, batch, denominator.updates_before)

        read = {name: batch if name == "batch" else getattr(batch, name) for name in self.columns}
        losses, report = self.loss(logprobs, old, advantages, **self.options, **read)
        check_tokens("the loss", losses, logprobs)
        if batch.weights is not None:
            losses = losses * batch.weights
        for term in self.terms:
            losses, more = term(losses, inputs)
            report = report | more
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

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> tuple[Tensor, Report]:
        now = inputs.logprobs.detach()
        change = now - inputs.old
        # exp(d) - 1 of a small d loses its digits, and the result its sign.
        k3 = change.expm1() - change
        return losses, {"train/drift_k1": inputs.old - now, "train/drift_k3": k3}


class EngineMismatch(Term):
    """Reports how far the engine's log-probs are from the trainer's, for the same weights."""

    reads = ("engine_logprobs",)

    def __call__(self, losses: Tensor, inputs: PolicyInputs) -> tuple[Tensor, Report]:
        difference = (inputs.old - inputs.batch.engine_logprobs).detach().abs()
        return losses, {
            "engine/logprob_mismatch": difference,
            "engine/logprob_mismatch_max": difference,
            "engine/logprob_mismatch_exp": torch.exp(difference),
        }
