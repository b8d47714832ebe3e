"""Choose the responses to learn from.

A masked response still counts in comparisons within the group, but in no denominator.
"""

import torch
from torch import Tensor

from lightrft.algorithms.advantage import solved_share
from lightrft.algorithms.rollout.episode_roles import ROLE_MARK, role_of
from lightrft.config.errors import ConfigError
from lightrft.core.advantages import Stage
from lightrft.core.batch import Experience, TrainingPlan
from lightrft.core.experience import LocalSamples
from lightrft.core.losses import sequence_means
from lightrft.core.metrics import Metrics


def mask_sequences(experience: Experience, mask: Tensor) -> None:
    """Mask the sequences where `mask` [N] is False."""
    experience.loss_mask = experience.loss_mask & mask[experience.sequence_ids]


class LengthFilter:
    """Learns from responses within --length_filter tokens; --mask_truncated drops truncated ones.

    DAPO, arXiv 2503.14476.
    """

    def __init__(self, bounds: list[float] | None, mask_truncated: bool):
        self.least, self.most = bounds or (0, float("inf"))
        self.mask_truncated = mask_truncated

    def __call__(self, local: LocalSamples) -> None:
        kept = [
            self.least <= len(row.token_ids) <= self.most
            and not (self.mask_truncated and row.truncated)
            for row in local.rows
        ]
        mask_sequences(local.experience, torch.tensor(kept, dtype=torch.bool))


class RoleFilter:
    """Learns from the conversations of --train_roles."""

    def __init__(self, roles: list[str]):
        self.roles = roles

    def __call__(self, local: LocalSamples) -> None:
        kept = [role_of(row) in self.roles for row in local.rows]
        mask_sequences(local.experience, torch.tensor(kept, dtype=torch.bool))

        # A step in which nothing is learned would not be noticed.
        present = set().union(*local.data.gather({role_of(row) for row in local.rows}))
        if not present.intersection(self.roles):
            raise ConfigError(
                f"--train_roles {' '.join(self.roles)}: the conversations of this step have only the"
                f" roles {', '.join(sorted(present))}: the model {ROLE_MARK}ROLE of a request is the"
                " role"
            )


class DifficultyFilter:
    """Learns from groups whose share of right responses is within --difficulty_filter."""

    def __init__(self, bounds: list[float]):
        self.least, self.most = bounds

    def __call__(self, local: LocalSamples) -> None:
        solved = solved_share(*local.table.totals())
        kept = (self.least <= solved) & (solved <= self.most)
        mask_sequences(local.experience, kept[local.numbers])


class EntropyFilter(Stage):
    """Learns from responses whose learned tokens have a mean entropy within --entropy_filter."""

    reads = ("entropy",)
    writes = ("loss_mask",)

    def __init__(self, bounds: list[float]):
        self.least, self.most = bounds

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        experience = plan.experience
        mean = sequence_means(experience.entropy.double(), experience)
        mask_sequences(experience, (self.least <= mean) & (mean <= self.most))
