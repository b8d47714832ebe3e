"""The teacher of on-policy distillation: log-probs of the tokens that the actor sampled."""

from typing import Protocol

from torch import Tensor

from lightrft.roles.microbatch import MicroBatchIndices
from lightrft.types import Batch


class Teacher(Protocol):
    """A model that returns log-probs: a Policy that never learns, or a RemoteTeacher."""

    def logprobs(self, batch: Batch, rows: MicroBatchIndices) -> Tensor:
        """Return log p of every learned token of a flat batch, 0 elsewhere.

        It is [T] float32 on the host. All ranks call it together.
        """
