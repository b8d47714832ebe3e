"""The reward model: one score for a whole sequence."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms.roles.padded import LENGTHS, SAMPLE_MASK, rows_of_ranks
from lightrft.algorithms.roles.role import DistributedRole
from lightrft.core.batch import Batch, JudgedBatch, to_device
from lightrft.core.losses import Reported, sequence_sums


class RewardModel(DistributedRole):
    """Reward model; its module is a models.heads.Scorer, read at the last token of each sequence.

    If it has several heads, the mean counts. Objectives of train() get scores [N], and the
    reports are [N]; they use the rows that are not masked.
    """

    NAME = "reward model"
    TRAIN_KEYS = (SAMPLE_MASK,)

    def get_scores(self, batch: Mapping[str, Any], mbs: int | None = None) -> Tensor:
        """Return the score at each token, [B, S] float32 on the host."""
        return self._answer(batch, lambda part: _mean(self.module(part)), mbs)

    def get_flat_scores(self, columns: Mapping[str, Any], mbs: int | None = None) -> Tensor:
        """Return the score at each token of this rank's rows, [T] float32 on the host.

        `columns` has the columns of a flat batch without `rows`, see
        data.conversations.flat_columns(). All ranks call it together.
        """
        data = self.strategy.mesh.data
        owners = rows_of_ranks(data.gather(len(columns["lengths"])))
        batch = Batch(**columns, rows=torch.tensor(owners[data.rank], dtype=torch.int64))
        return self._answer_flat(batch, owners, lambda micro: _mean(self.module(micro)), mbs)

    def get_rewards(self, batch: Mapping[str, Any], mbs: int | None = None) -> Tensor:
        """Return the rewards, [B] float32 on the host: the scores at the last tokens."""
        return self.get_scores(batch, mbs).gather(1, batch[LENGTHS].cpu().long()[:, None] - 1)[:, 0]

    def score(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> dict[str, Tensor]:
        """Return `scores` [B]: get_rewards() by the name that NeMo-RL has for it."""
        return {"scores": self.get_rewards(data, micro_batch_size)}

    def forward(self, batch: Batch) -> Reported:
        """Return the scores [N]."""
        return _mean(self._last(batch)), {}

    def scores_of_heads(self, batch: JudgedBatch) -> Reported:
        """Return for each sequence the score of the head that `batch.heads` names: [N]."""
        scores = self._last(batch)
        return scores if scores.ndim == 1 else scores.gather(1, batch.heads[:, None])[:, 0], {}

    def scores_of_tokens(self, batch: Batch) -> Reported:
        """Return the score at each token, [T], for a model with one head.

        A process reward model is read after each step.
        """
        return self.module(batch), {}

    def weight(self, batch: Batch) -> Tensor:
        """Return [N] bool: True for rows with learned tokens."""
        return sequence_sums(batch.loss_mask.float(), batch) > 0

    def _last(self, batch: Batch) -> Tensor:
        """Return the scores of whole sequences, [N] or [N, heads]."""
        scores = self.module(batch)
        return scores[to_device(batch.offsets[1:] - 1, scores.device)]


def _mean(scores: Tensor) -> Tensor:
    """Return the mean over heads: [T] or [T, heads] -> [T]."""
    return scores if scores.ndim == 1 else scores.mean(dim=1)
