"""The experience of a step on its way: as it was sampled, then balanced and planned.

A stage fills columns of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightrft.batching.micro_batches import MicroBatchIndices
from lightrft.batching.sample_store import SampleStore
from lightrft.core.batch import Experience
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Sample
from lightrft.parallel.collectives import Axis
from lightrft.rollout.groups import GatheredRewards


@dataclass(frozen=True, slots=True)
class LocalSamples:
    """This rank's own samples as experience, before sequences move between ranks."""

    experience: Experience
    rows: list[Sample]
    """[N] sample or branch of each sequence."""
    gathered: GatheredRewards
    numbers: Tensor
    """[N] int64: the response that each sequence belongs to, counted over all ranks."""
    data: Axis


LocalStage = Callable[[LocalSamples], None]
"""Masks local samples, or sets columns of the experience. All ranks call it."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """This rank's part of the experience, and the micro-batches of each optimizer step.

    minibatches[k][m] are the rows of micro-batch m of optimizer step k.
    """

    experience: Experience
    minibatches: list[MicroBatchIndices]
    store: SampleStore | None
    """Holds all columns of the experience. A store outside of this program shares them with
    others. None on a single rank that has no such store."""
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
