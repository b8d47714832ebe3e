"""Batches of experience for tests, and their losses, in float64 where values are compared."""

import torch
from torch import Tensor

from lightrft.algorithms.means import MeanCounts, PromptTokens
from lightrft.algorithms.terms import policy_objective
from lightrft.config import AlgorithmSection
from lightrft.core.batch import Batch, Experience
from lightrft.core.losses import Denominator


def make_batch(masks: list[str]) -> Batch:
    """Return a batch: `[".xx.x", ".x"]` are two sequences, where x is learned."""
    return Batch(**sequences(masks))


def sequences(masks: list[str]) -> dict[str, Tensor]:
    return {
        "lengths": torch.tensor([len(mask) for mask in masks], dtype=torch.int64),
        "input_ids": torch.arange(sum(map(len, masks))),
        "loss_mask": torch.tensor(
            [letter == "x" for mask in masks for letter in mask], dtype=torch.bool
        ),
        "rows": torch.arange(len(masks)),
    }


def random_experience(masks: list[str], seed: int, **columns: Tensor) -> Experience:
    """Return experience with noise everywhere, also where nothing is learned.

    Log-ratios are about 0.3, advantages about 1.
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(map(len, masks))

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(total, generator=generator, dtype=torch.float64)

    old = noise(1.0) - 2
    defaults = {
        "groups": torch.arange(len(masks)) // 2 * 10,
        "rewards": torch.zeros(len(masks)),
        "advantages": noise(1.0),
        "old_logprobs": old,
        "engine_logprobs": old + noise(0.3),
        "reference_logprobs": old + noise(0.3),
        "entropy": noise(1.0).abs(),
        "weights": (noise(1.0) > 0).double(),
        "marked": noise(1.0) > 0,
    }
    return Experience(**sequences(masks), **(defaults | columns))


def actor_logprobs(batch: Experience, seed: int) -> Tensor:
    """Return log-probs of an actor some steps after the old ones."""
    noise = torch.randn(
        batch.num_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return batch.old_logprobs + 0.3 * noise


def step_denominator(batch: Batch) -> Denominator:
    learned = [bool(mask.any()) for mask in batch.loss_mask.split(batch.lengths.tolist())]
    counts: dict[int, float] = {}
    masks = batch.loss_mask.split(batch.lengths.tolist())
    for group, mask in zip(batch.groups.tolist(), masks, strict=True):
        counts[group] = counts.get(group, 0.0) + float(mask.sum())
    return Denominator(
        batch.loss_mask.sum().float(),
        torch.tensor(float(sum(learned))),
        mean_counts=MeanCounts(7, PromptTokens.of(counts)),
    )


def loss_and_gradient(
    section: AlgorithmSection, batch: Experience, logprobs: Tensor, denominator: Denominator
) -> tuple:
    values = logprobs.clone().requires_grad_()
    loss, report = policy_objective(section)(values, batch, denominator)
    return loss.item(), torch.autograd.grad(loss, values)[0], report
