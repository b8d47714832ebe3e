"""Forecast the reward of a run: where it will be, and how long a target takes.

The curve is y(t) = a + b (1 - exp(-t / tau)), which saturates at a pace that the first steps hardly
show. So many values of tau are fitted, each counts by how well it explains the steps so far, and
the interval spans what they say together, with the uncertainty of a and b, and with a drift that
grows as far as the forecast looks ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FORECAST_STEPS = 12
"""Number of steps that a forecast needs."""
PACES = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 4.0, 8.0)
"""Values of tau, in numbers of steps so far."""
FORECAST_DRIFT = 1.5
"""How far a run leaves the curve, as a multiple of the noise of a step, when it has taken as many
steps again.

It was chosen so that intervals are right nine times of ten for the runs of
tests/extras/tools/learning_curves.json: 96 % on the half that it was chosen with, 87 % on the
other.
"""
CORRELATED = 3.0
"""Number of neighbouring steps that say what one would: rewards of prompts and policy persist."""
DRAWS = 4000
INTERVAL = (5.0, 50.0, 95.0)
"""Percentiles of the lower end, the forecast, and the upper end."""


@dataclass(frozen=True)
class Interval:
    """A forecast with the interval of 90 %."""

    low: float
    middle: float
    high: float


class Forecast:
    """Possible continuations of a learning curve."""

    def __init__(self, rewards: Sequence[float], *, most: float = np.inf):
        """Fit the rewards of all steps so far, one each. `most` is the largest possible reward.

        Raise ValueError for fewer than 12 steps.
        """
        if len(rewards) < FORECAST_STEPS:
            raise ValueError(
                f"a forecast needs {FORECAST_STEPS} steps, and there are {len(rewards)}"
            )

        self.most = most
        self.num_steps = len(rewards)
        values = np.asarray(rewards, dtype=np.float64)
        steps = np.arange(self.num_steps)
        generator = np.random.default_rng(0)

        fits = [self._fit(values, steps, pace * self.num_steps) for pace in PACES]
        self._noise = float(np.sqrt(max(min(error for *_, error in fits), 1e-12)))
        effective = self.num_steps / CORRELATED
        scores = np.array([-0.5 * effective * np.log(max(error, 1e-12)) for *_, error in fits])
        weights = np.exp(scores - scores.max())
        chosen = generator.choice(len(fits), DRAWS, p=weights / weights.sum())

        self._taus = np.array([pace * self.num_steps for pace in PACES])[chosen]
        best = np.stack([fit[0] for fit in fits])[chosen]
        factors = np.linalg.cholesky(np.stack([fit[1] for fit in fits]))[chosen]
        normal = generator.standard_normal((DRAWS, 2, 1))
        self._curves = best + (factors @ normal)[..., 0]
        self._drifts = generator.standard_normal(DRAWS) * FORECAST_DRIFT * self._noise

    @staticmethod
    def _fit(
        values: np.ndarray, steps: np.ndarray, tau: float
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Return a and b, their covariance, and the mean squared error."""
        columns = np.stack([np.ones(len(steps)), 1 - np.exp(-steps / tau)], 1)
        normal = columns.T @ columns
        best = np.linalg.solve(normal, columns.T @ values)
        error = float(np.mean((values - columns @ best) ** 2))
        return best, np.linalg.inv(normal) * max(error, 1e-12) * CORRELATED, error

    def at(self, step: int) -> Interval:
        """Return the forecast of the reward after `step` steps, without the noise of one step."""
        return Interval(*np.percentile(self._values(step), INTERVAL))

    def reaches(self, target: float, by: int) -> tuple[float, Interval]:
        """Return the probability that the reward reaches `target` until step `by`, and when.

        The interval is about the continuations that reach it; it is NaN where none does.
        """
        steps = np.unique(np.linspace(self.num_steps, by, 200).astype(int))
        reached = np.stack([self._values(int(step)) >= target for step in steps], 1)
        does = reached.any(1)
        when = steps[reached.argmax(1)][does]
        interval = np.percentile(when, INTERVAL) if len(when) else [np.nan] * 3
        return float(does.mean()), Interval(*interval)

    def _values(self, step: int) -> np.ndarray:
        ahead = np.sqrt(max(step - self.num_steps, 0) / self.num_steps)
        curves = self._curves[:, 0] + self._curves[:, 1] * (1 - np.exp(-step / self._taus))
        return np.minimum(curves + self._drifts * ahead, self.most)
