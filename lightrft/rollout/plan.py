"""What a step trains on, and the stages that fill the columns."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.batching.sample_store import SampleStore
from lightrft.observe.metrics import Metrics
from lightrft.roles.microbatch import MicroBatchIndices
from lightrft.types import Experience


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """This rank's part of the experience, and the micro-batches of each optimizer step.

    minibatches[k][m] are the rows of micro-batch m of optimizer step k.
    """

    experience: Experience
    minibatches: list[MicroBatchIndices]
    store: SampleStore
    """Holds all columns of the experience. A store outside of this program shares them with
    others."""
    num_updates: int = 1
    """How many optimizer steps use the experience."""

    @property
    def microbatches(self) -> MicroBatchIndices:
        """Return the micro-batches of all optimizer steps."""
        return [members for minibatch in self.minibatches for members in minibatch]


class Stage(ABC):
    """Computes columns of an experience; see lightrft/stages."""

    reads: Sequence[str] = ()
    """Columns that the stage needs."""
    writes: Sequence[str] = ()
    """Columns that the stage sets or changes."""
    depends_on_samples_alone = False
    """True if the stage can run before all samples of a step are complete."""

    @abstractmethod
    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        """Set the columns of the plan's experience. All ranks call it."""
