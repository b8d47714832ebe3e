"""Choose the tokens that the loss treats differently, in each optimizer step over all ranks."""

from collections.abc import Callable
from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.algorithms.covariance import marks
from lightrft.algorithms.options import options_of
from lightrft.algorithms.selection import top_share
from lightrft.algorithms.terms import OBSERVATIONS
from lightrft.config.sections import AlgorithmSection
from lightrft.core.advantages import Stage
from lightrft.core.batch import Experience, TrainingPlan, token_index
from lightrft.core.losses import Sum
from lightrft.core.metrics import Metrics


class HighEntropyTokens(Stage):
    """Learns only from the tokens with the highest entropy (--high_entropy_token_ratio)."""

    reads = ("entropy",)
    writes = ("weights",)

    def __init__(self, share: float, total: Sum):
        self.share = share
        self.total = total

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        chosen = of_steps(plan, lambda rows: top_share(rows.entropy, self.share, rows, self.total))
        plan.experience.weights = chosen.float()


class SelectedTokens(Stage):
    """Selects the tokens that --policy_loss treats differently, such as by covariance."""

    reads = ("old_logprobs", "advantages")
    writes = ("marked",)

    def __init__(self, section: AlgorithmSection, total: Sum):
        self.select = marks[section.policy_loss]
        self.options = options_of(self.select, section)
        self.total = total

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        plan.experience.marked = of_steps(
            plan, lambda rows: self.select(rows, self.total, **self.options)
        )


class WithPredictedObservations(Experience):
    """Experience whose observations with a weight have log-probs in training too.

    A micro-batch finds them on the host, before it is copied to the device.
    """

    @property
    def learned_tokens(self) -> Tensor:
        if self.learned is not None:
            return self.learned
        return (self.loss_mask | (getattr(self, OBSERVATIONS) > 0)).nonzero()[:, 0].cpu()


class LearnedObservations(Stage):
    """Weights the observations of episodes for a loss of their own (--observation_coef).

    They are the tokens after the first learned one of a sequence that are not learned themselves.
    The weights of an optimizer step sum to the coefficient over all ranks.
    """

    writes = (OBSERVATIONS,)

    def __init__(self, coefficient: float, total: Sum):
        self.coefficient = coefficient
        self.total = total

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        experience = plan.experience
        learned = F.pad(experience.loss_mask.cumsum(0), (1, 0))
        before = learned[experience.offsets[:-1]][experience.sequence_ids]
        weights = ((learned[1:] > before) & ~experience.loss_mask).float()

        for minibatch in plan.minibatches:
            rows = torch.tensor([row for members in minibatch for row in members]).long()
            tokens = token_index(experience.offsets, rows)
            count = self.total(weights[tokens].sum())
            weights[tokens] *= self.coefficient / count.clamp(min=1)
        experience.set_column(OBSERVATIONS, weights)
        columns = {each.name: getattr(experience, each.name) for each in fields(experience)}
        plan.experience = WithPredictedObservations(**columns)


def of_steps(plan: TrainingPlan, choose: Callable[[Experience], Tensor]) -> Tensor:
    """Apply `choose` to the sequences of each optimizer step: [T] bool."""
    experience = plan.experience
    chosen = torch.zeros_like(experience.loss_mask)
    for minibatch in plan.minibatches:
        rows = [row for members in minibatch for row in members]
        tokens = token_index(experience.offsets, torch.tensor(rows, dtype=torch.int64))
        chosen[tokens] = choose(experience.select(rows))
    return chosen
