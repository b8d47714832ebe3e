"""The experience of a step on its way: as it was sampled, then balanced and planned.

A stage fills columns of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightrft.core.batch import Experience
from lightrft.core.batches import TrainingPlan
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
