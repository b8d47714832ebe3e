"""Direct preference optimisation: losses of the log-ratios of policy and reference."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.algorithms.preferences.pairs import pair_report, split_pairs
from lightrft.config.sections import PreferenceSection
from lightrft.core.batch import JudgedBatch
from lightrft.core.losses import Denominator, Reported, Weighted, sequence_sums


def sigmoid(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), with the difference h of log-ratios:
    [P].

    Rafailov et al., arXiv 2305.18290, equation 7; smoothing e is cDPO: Mitchell, "A note on DPO
    with noisy preferences", 2023.
    """
    logits = beta * (chosen - rejected)
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


def ipo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """(h - 1 / (2 beta))^2, [P]: Azar et al., arXiv 2310.12036, equation 17."""
    return (chosen - rejected - 1 / (2 * beta)).square()


def hinge(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """max(0, 1 - beta h), [P]: Zhao et al., arXiv 2305.10425 (SLiC).

    The ratios are normalised as in arXiv 2309.06657.
    """
    return torch.relu(1 - beta * (chosen - rejected))


class DPOObjective:
    """Mean loss over all pairs of the optimizer step.

    The likelihood of the chosen answers can be added with a coefficient.
    """

    def __init__(self, section: PreferenceSection):
        self.section = section

    def reach(self, batch: JudgedBatch) -> str:
        """Return "pair": both answers of a pair determine the gradients of their tokens."""
        return "pair"

    def __call__(self, logprobs: Tensor, batch: JudgedBatch, denominator: Denominator) -> Reported:
        """Compute the loss [] from log-probs [T]. Reports are [P].

        `batch.reference` [N] has the sum of the reference's log-probs for each answer. Without it
        the policy is the reference, and all differences are exactly 0, whatever is rounded.
        `denominator.tokens` counts the learned tokens of chosen answers. SFT term: Pang et al.,
        arXiv 2404.19733, equation 3, with the mean over the tokens of the step.
        """
        section = self.section
        learned = batch.loss_mask
        logprobs = torch.where(learned, logprobs, 0.0)
        sums = sequence_sums(logprobs, batch)
        ratios = sums - (sums.detach() if batch.reference is None else batch.reference)
        if section.length_normalized:
            ratios = ratios / sequence_sums(learned.float(), batch).clamp(min=1)
        chosen, rejected = split_pairs(ratios)

        loss = self.losses(chosen, rejected).sum() / denominator.sequences
        report = pair_report(section.beta * chosen, section.beta * rejected, chosen > rejected)
        if section.sft_coef:
            # Chosen and rejected answers alternate; see pairs.py.
            of_chosen = learned & (batch.sequence_ids % 2 == 0)
            total = torch.where(of_chosen, logprobs, 0.0).sum()
            loss = loss - section.sft_coef * total / denominator.tokens
            report["train/sft_loss"] = Weighted(-logprobs.detach(), of_chosen.float())

        return loss, report

    def losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair from the log-ratios, [P]."""
        section = self.section
        if section.dpo_loss == "sigmoid":
            return sigmoid(chosen, rejected, section.beta, section.label_smoothing)
        return {"ipo": ipo, "hinge": hinge}[section.dpo_loss](chosen, rejected, section.beta)
