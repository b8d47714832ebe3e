"""Evidence against a mean, valid at every moment, and a bound on a mean that was measured."""

import math
from typing import Any

import numpy as np

BETS = 0.5 ** np.arange(1, 10)
"""Bets, as shares of the largest possible one, which would lose everything at a value of 0."""


class Evidence:
    """Evidence that the mean of values in [0, 1] has risen above `null`, at whatever moment.

    It is a mixture of bets (Waudby-Smith and Ramdas, arXiv 2010.09686, section 4): one that begins
    at value s and bets lambda has the capital

        W = prod over i >= s of (1 + lambda (x_i - null)).

    While the mean is at most `null`, no bet is expected to gain, and neither is the mixture. It has
    the same weight for each lambda, so that the variance need not be known, and the weight
    1 / (s (s + 1)) for each s, so that bets that begin with a late rise find it. These weights add
    up to 1. By Ville's inequality the mixture ever reaches 1/alpha with a probability of at most
    alpha, however long the run is.
    """

    def __init__(self, null: float, shape: tuple[int, ...] = ()):
        """Begin without values. `shape` has several independent streams side by side."""
        self.null = null
        self.log_capital = np.zeros((*shape, 0, len(BETS)))
        """Log capital of the bets that begin at each value, [..., values, bets]."""

    def add(self, value: Any) -> None:
        """Add the next value, in [0, 1], of each stream: [...]."""
        gain = np.asarray(value, dtype=float)[..., None, None] - self.null
        *shape, _, bets = self.log_capital.shape
        begun = np.concatenate([self.log_capital, np.zeros((*shape, 1, bets))], -2)
        self.log_capital = begun + np.log1p(BETS / self.null * gain)

    @property
    def log_value(self) -> Any:
        """Return the log of the evidence, [...]; 0 without values."""
        *shape, count, bets = self.log_capital.shape
        starts = np.arange(1, count + 1.0)
        capital = np.logaddexp.reduce(self.log_capital, -1) - np.log(bets * starts * (starts + 1))
        not_begun = np.full((*shape, 1), -np.log(count + 1))  # with a capital of 1 each
        return np.logaddexp.reduce(np.concatenate([capital, not_begun], -1), -1)

    @property
    def start(self) -> int:
        """Return the index of the value at which the bet with the most capital began."""
        return int(self.log_capital.max(-1).argmax())


def upper_bound(mean: float, count: int, error: float) -> float:
    """Return the largest mean that `count` independent values in [0, 1] leave possible.

    A true mean above it would give such a low average with a probability below `error` (Hoeffding
    1963, theorem 1, in the form exp(-n KL)).
    """
    means = np.linspace(mean, 1, 2**20)[:-1]
    # the Kullback-Leibler divergence of coins
    divergences = sum(p * np.log(p / q) for p, q in ((mean, means), (1 - mean, 1 - means)) if p)
    return float(means[count * divergences < -math.log(error)].max())
