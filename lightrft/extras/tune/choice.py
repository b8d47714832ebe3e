"""How sure a choice between runs is, given that the same run with another seed ends elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

SAMPLES = 200_000
BOUNDS = (5.0, 95.0)
"""Percentiles at the ends of an interval."""


@dataclass(frozen=True)
class Belief:
    """What several seeds say about one combination of values."""

    mean: float
    low: float
    high: float
    """Ends of the interval of 90 % of the mean over all seeds."""
    probability: float
    """Probability that this mean is the best one."""


def beliefs(results: Sequence[Sequence[float]], *, minimize: bool) -> list[Belief] | None:
    """Return what is known about each combination, given its results with different seeds.

    All combinations share one unknown variance over seeds, and nothing is known before: means have a
    flat prior and the variance has 1 / variance (Gelman et al., Bayesian Data Analysis, section 3.2,
    with a variance pooled over groups). None if no combination has two results that differ, because
    nothing then says how large the variance is.
    """
    freedom = sum(len(each) - 1 for each in results)
    means = np.array([fmean(each) for each in results])
    squares = sum(float(np.sum((np.asarray(each) - fmean(each)) ** 2)) for each in results)
    if squares == 0:
        return None

    generator = np.random.default_rng(0)
    variances = squares / generator.chisquare(freedom, (SAMPLES, 1))
    errors = generator.standard_normal((SAMPLES, len(results)))
    draws = means + errors * np.sqrt(variances / np.array([len(each) for each in results]))

    best = draws.argmin(1) if minimize else draws.argmax(1)
    shares = np.bincount(best, minlength=len(results)) / SAMPLES
    lows, highs = np.percentile(draws, BOUNDS, axis=0)
    columns = zip(means, lows, highs, shares, strict=True)
    return [Belief(*map(float, each)) for each in columns]
