"""The critic: what the rest of a response is expected to be worth, at every token."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms.objectives import TokenGradients
from lightrft.roles.microbatch import MicroBatchIndices
from lightrft.roles.role import Report, Role
from lightrft.types import Batch


class Critic(Role):
    """Its module is a models.heads.Scorer."""

    def get_values(self, batch: Mapping[str, Any], mbs: int | None = None) -> dict[str, Tensor]:
        """`values` [B, S] float32: for each token the value of the state in which it is chosen, that is after the tokens
        before it. Column 0 and the padding are 0, as in get_logprobs().
        """
        return {"values": self._answer(batch, self.module, lambda part: self.forward(part)[0], mbs)}

    def values(self, batch: Batch, rows: MicroBatchIndices) -> Tensor:
        """The same for a flat batch: [T] float32 on the host."""
        return self._infer(self.module, lambda part: self.forward(part)[0], batch, rows)

    def forward(self, batch: Batch, gradients: TokenGradients | None = None) -> tuple[Tensor, Report]:
        """Values of all tokens [T]; objectives look at the learned ones."""
        scores = self.module(batch)
        return torch.where(batch.position_ids > 0, scores.roll(1), 0.0), {}
