"""The teacher of on-policy distillation: what it says of tokens that the actor sampled."""

from typing import Protocol

from torch import Tensor

from lightrft.roles.microbatch import MicroBatchIndices
from lightrft.types import Batch


class Teacher(Protocol):
    """A Policy that never learns is one, RemoteTeacher another."""

    def logprobs(self, batch: Batch, rows: MicroBatchIndices) -> Tensor:
        """log p of every learned token of a flat batch, 0 elsewhere: [T] float32 on the host. All ranks call it together."""
