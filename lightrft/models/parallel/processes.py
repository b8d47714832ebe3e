"""All processes of a run; they may be divided into two worlds."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class RunProcesses:
    """All processes of a run, and which of them this one is.

    With `rollout_ranks` the last ranks only generate. Each side has a default process group of its
    own, so it is the whole world to the code that runs there.
    """

    store: dist.Store
    """Store that all processes share."""
    rank: int
    size: int
    timeout: timedelta
    """Limit of a collective."""
    rollout_ranks: int = 0
    ranks_per_node: int = 1
    """Processes that the launcher has started on each machine, in the order of their ranks.

    An engine may change the launcher's variables later.
    """
    created: bool = True
    """True if the process group was created here."""

    @property
    def one_node(self) -> bool:
        """Return True if all processes are on one machine."""
        return self.ranks_per_node == self.size

    @property
    def generates(self) -> bool:
        """Return True if this rank only generates."""
        return self.rank >= self.size - self.rollout_ranks

    @property
    def generates_elsewhere(self) -> bool:
        """Return True if this rank trains, and other ranks generate for it."""
        return self.rollout_ranks > 0 and not self.generates

    @property
    def side(self) -> str:
        """Return the name of this rank's world; empty if there is only one."""
        return "" if not self.rollout_ranks else "rollout" if self.generates else "training"
