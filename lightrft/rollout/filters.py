"""Choose the responses to learn from.

A masked one still counts for its group, but for no denominator.
"""

import torch
from torch import Tensor

from lightrft.algorithms.advantage import solved_share
from lightrft.algorithms.reduce import sequence_means
from lightrft.config.sections import AlgorithmSection
from lightrft.types import Experience, Sample


def by_length(samples: list[Sample], section: AlgorithmSection) -> Tensor:
    """Return [N] bool: neither too short nor too long, and not truncated if --mask_truncated is set
    (DAPO, arXiv 2503.14476).
    """
    least, most = section.length_filter or (0, float("inf"))
    complete = [
        not (sample.masked or (section.mask_truncated and sample.truncated)) for sample in samples
    ]
    fits = [least <= len(sample.token_ids) <= most for sample in samples]
    return torch.tensor(complete, dtype=torch.bool) & torch.tensor(fits, dtype=torch.bool)


def by_difficulty(rewards: Tensor, groups: Tensor, section: AlgorithmSection) -> Tensor:
    """Return [N] bool: the share of right responses in the group is within --difficulty_filter.

    `rewards` [N], `groups` [N].
    """
    least, most = section.difficulty_filter or (0.0, 1.0)
    solved = solved_share(rewards, groups)
    return (least <= solved) & (solved <= most)


def by_entropy(experience: Experience, section: AlgorithmSection) -> Tensor:
    """Return [N] bool: the mean entropy of the learned tokens is within the two numbers of
    --entropy_filter.
    """
    least, most = section.entropy_filter
    mean = sequence_means(experience.entropy.double(), experience)
    return (least <= mean) & (mean <= most)


def mask_sequences(experience: Experience, mask: Tensor) -> None:
    """Mask the sequences where `mask` [N] is False."""
    experience.loss_mask = experience.loss_mask & mask[experience.sequence_ids]
