"""Direct preference optimisation: losses of the log-ratios of policy and reference."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.algorithms.preferences.pairs import pair_report, split_pairs
from lightrft.config.sections import REFERENCE_FREE, PreferenceSection
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


def robust(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float) -> Tensor:
    """(-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e), [P].

    Its expectation over preferences that are reversed with probability e is the loss sigmoid: Ray
    Chowdhury et al., arXiv 2403.00409.
    """
    logits = beta * (chosen - rejected)
    difference = smoothing * F.logsigmoid(-logits) - (1 - smoothing) * F.logsigmoid(logits)
    return difference / (1 - 2 * smoothing)


def exo(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float) -> Tensor:
    """KL of (sigmoid(beta h), sigmoid(-beta h)) from (1 - e, e), [P]: Ji et al., arXiv 2402.00856,
    equation 16.
    """
    logits = beta * (chosen - rejected)
    terms = ((logits, 1 - smoothing), (-logits, smoothing))
    return sum(each.sigmoid() * (F.logsigmoid(each) - math.log(p)) for each, p in terms)


def bco(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta c) - log sigmoid(-beta r), [P], with both log-ratios: Jung et al., arXiv
    2404.04656, without the shift of the rewards.
    """
    return -F.logsigmoid(beta * chosen) - F.logsigmoid(-beta * rejected)


def apo_zero(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """1 - sigmoid(beta c) + sigmoid(beta r), [P]: D'Oosterlinck et al., arXiv 2408.06266, equation
    7. Chosen answers become more probable, and rejected ones less.
    """
    return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)


def apo_down(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """sigmoid(beta c) + 1 - sigmoid(beta h), [P]: the same paper, equation 8. Both answers become
    less probable, the rejected one more so.
    """
    return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))


def simpo(chosen: Tensor, rejected: Tensor, beta: float, gamma: float) -> Tensor:
    """-log sigmoid(beta d - gamma), [P], with the difference d of mean log-probs: Meng et al., arXiv
    2405.14734.
    """
    return -F.logsigmoid(beta * (chosen - rejected) - gamma)


def orpo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """-beta log sigmoid(o(c) - o(r)), [P], with o(x) = log(e^x / (1 - e^x)) of mean log-probs: Hong et
    al., arXiv 2403.07691. The paper adds the likelihood of chosen answers.
    """
    # In float32 a probability may be 1.
    sides = (each.clamp(max=-1e-7) for each in (chosen, rejected))
    better, worse = (each - torch.log(-torch.expm1(each)) for each in sides)
    return -beta * F.logsigmoid(better - worse)


PAIR_LOSSES: dict[str, tuple[Callable[..., Tensor], *tuple[str, ...]]] = {
    "sigmoid": (sigmoid, "label_smoothing"),
    "ipo": (ipo,),
    "hinge": (hinge,),
    "robust": (robust, "label_smoothing"),
    "exo": (exo, "label_smoothing"),
    "bco": (bco,),
    "apo_zero": (apo_zero,),
    "apo_down": (apo_down,),
    # of log-probs without a reference: Xu et al., arXiv 2401.08417, and arXiv 2305.10425
    "cpo": (sigmoid, "label_smoothing"),
    "slic": (hinge,),
    "simpo": (simpo, "simpo_gamma"),
    "orpo": (orpo,),
}
"""--dpo_loss -> function of both log-ratios and beta, and the field of its last parameter."""
OF_MEANS = ("simpo", "orpo")
"""Losses of mean log-probs."""


def answer_sums(logprobs: Tensor, batch: JudgedBatch, ld_alpha: float) -> Tensor:
    """Return the sums over the learned tokens of both answers: [N].

    The tokens of an answer beyond the length of the other one count `ld_alpha`: Liu et al., arXiv
    2409.06411 (LD-DPO).
    """
    learned = batch.loss_mask
    logprobs = torch.where(learned, logprobs, 0.0)
    if ld_alpha < 1:
        lengths = sequence_sums(learned.long(), batch)
        other = (torch.arange(len(lengths), device=lengths.device) ^ 1).clamp(max=len(lengths) - 1)
        starts = lengths.cumsum(0) - lengths
        common = starts + torch.minimum(lengths, lengths[other])
        beyond = learned.long().cumsum(0) > common[batch.sequence_ids]
        logprobs = torch.where(beyond, ld_alpha * logprobs, logprobs)
    return sequence_sums(logprobs, batch)


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
        the policy is the reference, and all differences are exactly 0, whatever is rounded. Losses
        without a reference use the log-probs themselves.
        `denominator.tokens` counts the learned tokens of chosen answers. SFT term: Pang et al.,
        arXiv 2404.19733, equation 3, with the mean over the tokens of the step.
        """
        section = self.section
        learned = batch.loss_mask
        ratios = answer_sums(logprobs, batch, section.ld_alpha)
        if section.dpo_loss not in REFERENCE_FREE:
            ratios = ratios - (ratios.detach() if batch.reference is None else batch.reference)
        if section.length_normalized or section.dpo_loss in OF_MEANS:
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
        function, *names = PAIR_LOSSES[self.section.dpo_loss]
        others = (getattr(self.section, name) for name in names)
        return function(chosen, rejected, self.section.beta, *others)
