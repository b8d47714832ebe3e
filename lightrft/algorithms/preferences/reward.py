"""Losses of reward models, from the scores of two answers to one prompt."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.algorithms.preferences.pairs import pair_report, split_pairs
from lightrft.config.sections import PreferenceSection
from lightrft.core.batch import JudgedBatch
from lightrft.core.losses import Denominator, Reported, Weighted


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """-log sigmoid(chosen - rejected - margin), [P].

    Bradley and Terry, Biometrika 39, 1952; with margins: Touvron et al., arXiv 2307.09288, section
    3.2.2.
    """
    return -F.logsigmoid(chosen - rejected - margin)


def log_exp(chosen: Tensor, rejected: Tensor) -> Tensor:
    """log(1 + exp(rejected - chosen)), [P]: Bai et al., arXiv 2204.05862.

    It equals bradley_terry() without a margin.
    """
    return F.softplus(rejected - chosen)


def rao_kupper(
    chosen: Tensor, rejected: Tensor, margin: Tensor, tie: Tensor, threshold: float
) -> Tensor:
    """Return the negative log-likelihood of preferences and ties: [P]. `tie` is [P] bool.

    P(chosen wins) = e^c / (e^c + theta e^r); P(tie) = (theta^2 - 1) P(chosen wins) P(rejected
    wins), for the threshold theta > 1. The margin is subtracted from the difference of a
    preference, and not of a tie. Rao and Kupper, JASA 62, 1967.
    """
    wins, loses = _log_wins(chosen - rejected - torch.where(tie, 0.0, margin), threshold)
    return -torch.where(tie, math.log(threshold**2 - 1) + wins + loses, wins)


def _log_wins(difference: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities that the chosen and that the rejected answer wins, [P] each."""
    shift = math.log(threshold)
    return F.logsigmoid(difference - shift), F.logsigmoid(-difference - shift)


class RewardObjective:
    """Mean loss over all pairs of the optimizer step, with the accuracy and scores of each head."""

    def __init__(self, section: PreferenceSection, heads: list[str]):
        """Set up the objective. `heads` has the names of the heads if there are several."""
        self.section = section
        self.heads = heads

    def __call__(self, scores: Tensor, batch: JudgedBatch, denominator: Denominator) -> Reported:
        """Compute the loss [] from scores [N]; reports are [P]."""
        chosen, rejected = split_pairs(scores)
        tie = split_pairs(batch.ties)[0]
        losses = self.losses(chosen, rejected, split_pairs(batch.margins)[0], tie)
        right = self.is_right(chosen.detach() - rejected.detach(), tie)
        report = pair_report(chosen, rejected, right)
        for index, name in enumerate(self.heads):
            has_head = split_pairs(batch.heads)[0] == index
            report[f"train/accuracy_of_{name}"] = Weighted(right.float(), has_head.float())

        return losses.sum() / denominator.sequences, report

    def losses(self, chosen: Tensor, rejected: Tensor, margin: Tensor, tie: Tensor) -> Tensor:
        """Return the loss of each pair, [P]."""
        if self.section.rm_loss == "ties":
            return rao_kupper(chosen, rejected, margin, tie, self.section.tie_threshold)
        if self.section.rm_loss == "logexp":
            return log_exp(chosen, rejected)
        return bradley_terry(chosen, rejected, margin)

    def is_right(self, difference: Tensor, tie: Tensor) -> Tensor:
        """Return where the likeliest outcome is the judgement, [P] bool.

        A tie counts as right where it is likelier than a win of either answer.
        """
        if self.section.rm_loss != "ties":
            return difference > 0
        wins, loses = _log_wins(difference, self.section.tie_threshold)
        ties = math.log(self.section.tie_threshold**2 - 1) + wins + loses
        likely_tie = ties > torch.maximum(wins, loses)
        return torch.where(tie, likely_tie, difference > 0)
