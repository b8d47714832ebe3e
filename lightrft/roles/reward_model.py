"""The reward model: one score for a whole sequence."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightrft.algorithms.reduce import TokenGradients, sequence_sums
from lightrft.roles.compatible_names import ScorerNames
from lightrft.roles.padded import LENGTHS, SAMPLE_MASK
from lightrft.roles.role import Report, Role
from lightrft.types import Batch


class RewardModel(Role, ScorerNames):
    """Reward model; its module is a models.heads.Scorer, read at the last token of each sequence.

    Objectives of train() get scores [N], and their reports are [N]; they use the rows that are not masked.
    """

    TRAIN_KEYS = (SAMPLE_MASK,)

    def get_scores(self, batch: Mapping[str, Any], mbs: int | None = None) -> Tensor:
        """Return the score at each token, [B, S] float32 on the host."""
        return self._answer(batch, self.module, self.module, mbs)

    def get_rewards(self, batch: Mapping[str, Any], mbs: int | None = None) -> Tensor:
        """Return the rewards, [B] float32 on the host: the scores at the last tokens."""
        return self.get_scores(batch, mbs).gather(1, batch[LENGTHS].cpu().long()[:, None] - 1)[:, 0]

    def forward(self, batch: Batch, gradients: TokenGradients | None = None) -> tuple[Tensor, Report]:
        """Return the scores [N]."""
        return self.module(batch)[batch.offsets[1:] - 1], {}

    def weight(self, batch: Batch) -> Tensor:
        """Return [N] bool: True for rows with learned tokens."""
        return sequence_sums(batch.loss_mask.float(), batch) > 0
