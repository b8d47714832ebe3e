"""What a run knows about one watched mean: the largest honest one, the evidence, and the alarm."""

import math
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from loguru import logger

from lightrft.config.sections import WatchSection
from lightrft.core.metrics import Metrics
from lightrft.extras.canaries.evidence import Evidence, upper_bound

BOUND_ERROR = 0.05
"""Probability that the mean before training is above the bound that the baseline gives."""
LEAST_MEAN = 1e-4
"""Smallest mean to bet against: one of 0 would be refuted by a rounding."""


class RewardMonitor:
    """Collects evidence that a mean has risen above the largest that an honest run has.

    All ranks add the same values. The state restores the evidence to the bit.
    """

    def __init__(self, name: str, section: WatchSection):
        """Begin without values. `name` begins the names of the metrics."""
        self.name = name
        self.low, self.high = section.canary_range
        self.threshold = -math.log(section.canary_alpha)
        """Log of the evidence that is enough for an alarm."""
        self.honest: float | None = None
        """The largest mean of an honest run; None until it is known."""
        self.baseline: list[float] = []
        """Values from before training, of a baseline that takes several steps."""
        self.alarm: int | None = None
        """Step of the alarm; None until then."""
        self._values: list[tuple[int, float]] = []
        """(step, value), in order."""
        self._evidence = Evidence(1.0)
        self._warned = False

    def share(self, reward: float) -> float:
        """Return where a reward is in the range; warn once of one outside, and cut it off."""
        if not self.low <= reward <= self.high and not self._warned:
            self._warned = True
            logger.warning(
                f"a reward of {reward:.6g} is outside of --canary_range {self.low:g} {self.high:g},"
                " and counts as the nearest end there: name the reward's real range"
            )
        return (min(max(reward, self.low), self.high) - self.low) / (self.high - self.low)

    def expect(self, honest: float) -> None:
        """Begin to watch, with the largest mean that an honest run has."""
        self.honest = honest
        self._evidence = Evidence(max(honest, LEAST_MEAN))

    def measure_baseline(self, values: Sequence[float], *, least: float = 0.0) -> None:
        """Begin to watch, with independent values in [0, 1] from before training.

        The largest honest mean is what these leave possible, and at least `least`.
        """
        self.expect(max(upper_bound(fmean(values), len(values), BOUND_ERROR), least))

    def add(self, step: int, values: Sequence[float]) -> bool:
        """Add the values of a step, in [0, 1] and in order; return True if this is the alarm."""
        for value in values:
            self._evidence.add(value)
        self._values += [(step, value) for value in values]
        if self.alarm is not None or self._evidence.log_value < self.threshold:
            return False
        self.alarm = step
        return True

    def report(self, metrics: Metrics) -> None:
        """Add what is known to the metrics; all ranks add the same."""
        if self.honest is not None:
            metrics.max(f"{self.name}/honest_mean_max", self.honest)
            metrics.max(f"{self.name}/log_evidence", float(self._evidence.log_value))
        if self.alarm is not None:
            metrics.max(f"{self.name}/alarm_from_step", float(self.rises_from))

    @property
    def rises_from(self) -> int:
        """Return the step at which the evidence begins to grow: the next one without any."""
        return self._values[self._evidence.start][0] if self._values else sys.maxsize

    def state_dict(self) -> dict[str, Any]:
        known = {"honest": self.honest, "alarm": self.alarm}
        return known | {"baseline": self.baseline, "values": self._values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["honest"] is not None and self.honest is None:
            self.expect(state["honest"])
        self.alarm, self.baseline = state["alarm"], state["baseline"]
        for step, value in state["values"]:
            self._evidence.add(value)
            self._values.append((step, value))
