"""KTO: single answers that are desirable or not, compared with the KL from the reference."""

import torch
from torch import Tensor

from lightrft.config.sections import PreferenceSection
from lightrft.core.batch import JudgedBatch
from lightrft.core.losses import Denominator, Reported, Weighted, sequence_sums


def kto(
    rewards: Tensor, desirable: Tensor, divergence: Tensor, weights: tuple[float, float]
) -> Tensor:
    """Return w (1 - sigmoid(r - z)) for desirable and w (1 - sigmoid(z - r)) for other answers:
    [N].

    `rewards` r [N] are beta log(p_policy / p_reference). `divergence` z [] is beta times the KL of
    the policy from the reference, without a gradient. `weights` holds w for desirable and for other
    answers. Ethayarajh et al., arXiv 2402.01306, equation 8.
    """
    signs = torch.where(desirable, 1.0, -1.0)
    distances = torch.sigmoid(-signs * (rewards - divergence))
    return torch.where(desirable, weights[0], weights[1]) * distances


def reference_point(log_ratios: Tensor) -> Tensor:
    """Return max(0, mean of log(p_policy / p_reference)), [], over the given log-ratios [N].

    They are of mismatched answers, from all ranks (section 4.1).
    """
    return log_ratios.mean().clamp(min=0)


class KTOObjective:
    """Mean loss over all answers of the optimizer step."""

    def __init__(self, section: PreferenceSection, divergence: Tensor):
        """Set up the objective of one step. `divergence` [] is the reference point."""
        self.section = section
        self.divergence = divergence

    def reach(self, batch: JudgedBatch) -> str:
        """Return "sequence": an answer alone determines the gradients of its tokens."""
        return "sequence"

    def __call__(self, logprobs: Tensor, batch: JudgedBatch, denominator: Denominator) -> Reported:
        """Compute the loss [] from log-probs [T]. Reports are [N].

        `batch.reference` [N] has the sum of the reference's log-probs for each answer.
        """
        section = self.section
        good = batch.desirable
        # an empty micro-batch has a sequence that is not learned
        present = sequence_sums(batch.loss_mask.float(), batch) > 0
        sums = sequence_sums(torch.where(batch.loss_mask, logprobs, 0.0), batch)
        rewards = section.beta * (sums - batch.reference)
        divergence = section.beta * self.divergence
        weights = (section.desirable_weight, section.undesirable_weight)
        losses = kto(rewards, good, divergence, weights)
        implicit_rewards = rewards.detach()
        desired = (present & good).float()
        other = (present & ~good).float()
        right = ((implicit_rewards > divergence) == good).float()
        report = {
            "train/reward_desirable": Weighted(implicit_rewards, desired),
            "train/reward_undesirable": Weighted(implicit_rewards, other),
            "train/accuracy": Weighted(right, present.float()),
            "train/kl": Weighted(self.divergence.expand(len(implicit_rewards)), present.float()),
        }

        return torch.where(present, losses, 0.0).sum() / denominator.sequences, report
