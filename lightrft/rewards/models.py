"""Scores of reward models for whole responses, which are added to the rewards of the reward function."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightrft.roles.padded import IDS, LENGTHS
from lightrft.roles.reward_model import RewardModel
from lightrft.types import Sample

FUNCTION = "function"
"""Name of the part of a reward that the reward function returned as one number."""


class ModelRewards:
    """Reward models that score prompt and response, as tokens; the score at the last token counts."""

    def __init__(self, models: Mapping[str, RewardModel], coefficient: float = 1.0):
        """Set up the models, by the name of their metric; scores are multiplied by `coefficient`."""
        self.models, self.coefficient = models, coefficient

    def __call__(self, samples: list[Sample]) -> None:
        """Add every model's score to the reward of each sample. All ranks call it together, with any number of samples.

        Raises ValueError, on all ranks, for a score that is not finite.
        """
        batch = _batch(samples)
        for name, model in self.models.items():
            scores = self.coefficient * model.get_rewards(batch)
            _check(name, scores, model)
            for sample, score in zip(samples, scores.tolist(), strict=True):
                _add(sample, name, score)


def _batch(samples: list[Sample]) -> dict[str, Tensor]:
    """Return [B, S] ids, right-padded, and [B] lengths; also for no samples."""
    ids = [torch.tensor([*sample.prompt.token_ids, *sample.token_ids]) for sample in samples]
    padded = pad_sequence(ids, batch_first=True) if ids else torch.zeros(0, 1, dtype=torch.int64)
    return {IDS: padded, LENGTHS: torch.tensor([len(row) for row in ids], dtype=torch.int64)}


def _check(name: str, scores: Tensor, model: RewardModel) -> None:
    wrong = model.strategy.mesh.data.sum((~scores.isfinite()).sum().float()[None])
    if wrong:
        raise ValueError(f"--reward_pretrain: {name} returned {int(wrong)} scores that are not finite")


def _add(sample: Sample, name: str, score: float) -> None:
    sample.reward_parts = (sample.reward_parts or {FUNCTION: sample.reward}) | {name: score}
    sample.reward += score
    if sample.token_rewards is not None:
        *before, last = sample.token_rewards
        sample.token_rewards = [*before, (last or 0.0) + score]
