"""What a step needs of rewards: to begin with a group while others decode, and to wait."""

from collections.abc import Callable, Sequence
from typing import Protocol

from lightrft.core.samples import Sample


class Rewards(Protocol):
    """Scores samples. `rewards/runner.py` has worker processes, time limits and components."""

    def begin(self, samples: list[Sample]) -> None:
        """Begin to score the samples of one prompt."""

    def finish(self, samples: list[Sample]) -> None:
        """Wait for everything that was begun, and set the rewards. All ranks call it together."""


class CallFunction:
    """Calls a function of samples in this process, once for all groups of a step.

    Columns of the data are in `sample.prompt.columns`; functions of a run get them by name.
    """

    def __init__(self, function: Callable[[list[Sample]], Sequence[float]]):
        self.function = function

    def begin(self, samples: list[Sample]) -> None:
        """Do nothing: finish() gets these samples too."""

    def finish(self, samples: list[Sample]) -> None:
        for sample, reward in zip(samples, self.function(samples), strict=True):
            sample.reward = float(reward)
