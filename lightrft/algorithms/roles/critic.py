"""The critic: the expected value of the rest of a response, at every token."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms.roles.role import DistributedRole
from lightrft.core.batch import Batch, Rows
from lightrft.core.losses import Reported


class Critic(DistributedRole):
    """Value model; its module is a models.heads.Scorer."""

    NAME = "critic"

    def get_values(self, batch: Mapping[str, Any], mbs: int | None = None) -> dict[str, Tensor]:
        """Return `values` [B, S] float32: for each token the value of the state before it.

        That is the state after the earlier tokens, where it is chosen. Column 0 and the padding are
        0, as in get_logprobs().
        """
        return {"values": self._answer(batch, lambda micro: self.forward(micro)[0], mbs)}

    def values(self, batch: Batch, rows: Rows) -> Tensor:
        """Return the same values for a flat batch: [T] float32 on the host."""
        return self.infer(lambda micro: self.forward(micro)[0], batch, rows)

    def forward(self, batch: Batch) -> Reported:
        """Return the values of all tokens [T]; objectives use the learned ones."""
        scores = self.module(batch)
        return torch.where(batch.position_ids > 0, scores.roll(1), 0.0), {}
