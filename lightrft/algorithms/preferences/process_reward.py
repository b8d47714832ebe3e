"""Process reward models: the probability that each step of an answer is right."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.core.batch import JudgedBatch
from lightrft.core.losses import Denominator, Reported, Weighted, token_mean


def step_objective(scores: Tensor, batch: JudgedBatch, denominator: Denominator) -> Reported:
    """Binary cross entropy of sigmoid(score) and the label at the end of each step.

    The mean is over all steps of the optimizer step. scores [T] float32, read at the learned
    tokens, where `batch.targets` [T] are labels from 0 to 1; returns [] and reports [T]. Lightman
    et al., arXiv 2305.20050.
    """
    losses = F.binary_cross_entropy_with_logits(scores, batch.targets, reduction="none")
    probability = scores.detach().sigmoid()
    right = batch.targets > 0.5
    learned = batch.loss_mask.float()
    report = {
        "train/accuracy": Weighted(((probability > 0.5) == right).float(), learned),
        "train/probability_right": Weighted(probability, torch.where(right, learned, 0.0)),
        "train/probability_wrong": Weighted(probability, torch.where(right, 0.0, learned)),
    }
    return token_mean(losses, batch, denominator), report
