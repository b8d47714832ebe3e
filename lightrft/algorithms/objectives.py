"""Training objectives: from the log-probs of one micro-batch to its share of the global loss.

An objective is called with the values of a role, the batch, and the denominator of the whole
optimizer step. `reach` says what determines the gradient of a token. The objective of PPO, GRPO and
the like is built in terms.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.algorithms.kl import generalized_jsd
from lightrft.config.sections import AlgorithmSection
from lightrft.core.batch import Batch, Experience
from lightrft.core.losses import Denominator, Reported, by_token, token_mean
from lightrft.models.balance import Balance


class ValueObjective:
    """Objective of the critic: clipped squared distance to the returns."""

    def __init__(self, section: AlgorithmSection):
        self.section = section

    def __call__(self, values: Tensor, batch: Experience, denominator: Denominator) -> Reported:
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


def sft(logprobs: Tensor, batch: Batch, denominator: Denominator) -> Reported:
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

    def __call__(self, logprobs: Tensor, batch: Batch, denominator: Denominator) -> Reported:
        """Compute the mean over answer tokens, from log-probs [T], or [T, 1 + K] with a teacher."""
        name = "train/ptx_loss"
        values = -logprobs
        if self.beta is not None:
            name = "train/ptx_divergence"
            values = generalized_jsd(logprobs[:, 1:], batch.teacher_logprobs, self.beta)
        return self.coefficient * token_mean(values, batch, denominator), {name: values}


class Balanced:
    """Another objective plus the load-balancing loss of experts times a coefficient."""

    def __init__(self, objective: Callable[..., Reported], balance: Balance, coefficient: float):
        self.of_logprobs = objective
        self.balance = balance
        self.coefficient = coefficient

    def __call__(self, logprobs: Tensor, batch: Batch, denominator: Denominator) -> Reported:
        loss, report = self.of_logprobs(logprobs, batch, denominator)
        report |= {"train/aux_loss": self.balance.loss.expand(len(logprobs))}
        return loss + self.coefficient * self.balance.share(batch.routing), report
