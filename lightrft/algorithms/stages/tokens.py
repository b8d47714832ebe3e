"""Choose the tokens that the loss treats differently, in each optimizer step over all ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightrft.algorithms.covariance import marks
from lightrft.algorithms.options import options_of
from lightrft.algorithms.selection import top_share
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


def of_steps(plan: TrainingPlan, choose: Callable[[Experience], Tensor]) -> Tensor:
    """Apply `choose` to the sequences of each optimizer step: [T] bool."""
    experience = plan.experience
    chosen = torch.zeros_like(experience.loss_mask)
    for minibatch in plan.minibatches:
        rows = [row for members in minibatch for row in members]
        tokens = token_index(experience.offsets, torch.tensor(rows, dtype=torch.int64))
        chosen[tokens] = choose(experience.select(rows))
    return chosen
