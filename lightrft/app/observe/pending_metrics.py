"""Save metrics of steps that have no row yet (--logging_steps) as an item of a checkpoint."""

from typing import Any

from lightrft.core.metrics import Metrics
from lightrft.models.parallel.collectives import Axis


class PendingMetrics:
    """The metrics of all ranks as a state; another number of ranks divides them anew."""

    def __init__(self, metrics: Metrics, world: Axis):
        self.metrics = metrics
        self.world = world

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": self.world.gather(self.metrics.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.metrics.clear()
        for local_state in state["ranks"][self.world.rank :: self.world.size]:
            self.metrics.load_state_dict(local_state)
