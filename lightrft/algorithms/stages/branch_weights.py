"""Give the conversations of an episode together the weight of one (--branch_weight episode)."""

import torch

from lightrft.algorithms.means import BRANCH_WEIGHTS
from lightrft.core.advantages import Stage
from lightrft.core.batch import TrainingPlan
from lightrft.core.experience import LocalSamples
from lightrft.core.losses import Sum, sequence_sums
from lightrft.core.metrics import Metrics


def split_among_branches(local: LocalSamples) -> None:
    """Give each conversation of an episode 1 / the number of those that are learned from."""
    sizes: list[int] = []
    begun = 0
    while begun < len(local.rows):  # the branches follow the first conversation of their episode
        sizes.append(len(local.rows[begun].rows))
        begun += sizes[-1]
    episode = torch.repeat_interleave(torch.tensor(sizes, dtype=torch.int64))

    learned = (sequence_sums(local.experience.loss_mask.float(), local.experience) > 0).float()
    counts = learned.new_zeros(len(sizes)).index_add(0, episode, learned)
    local.experience.set_column(BRANCH_WEIGHTS, 1 / counts.clamp(min=1)[episode], "sequence")


class BranchWeights(Stage):
    """Scales the weights of each optimizer step so that their mean is 1, over all ranks.

    It is the mean over tokens if the loss is, and otherwise the mean over sequences.
    """

    reads = (BRANCH_WEIGHTS,)
    writes = (BRANCH_WEIGHTS,)

    def __init__(self, total: Sum, *, by_token: bool):
        self.total = total
        self.by_token = by_token

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        experience = plan.experience
        learned = sequence_sums(experience.loss_mask.double(), experience)
        counted = learned if self.by_token else (learned > 0).double()
        weights = getattr(experience, BRANCH_WEIGHTS)
        for minibatch in plan.minibatches:
            rows = [row for members in minibatch for row in members]
            step = torch.stack([counted[rows].sum(), (counted * weights)[rows].sum()])
            count, weighted = self.total(step)
            weights[rows] *= (count / weighted).float() if weighted else 1.0
