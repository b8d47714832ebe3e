"""Scores of an evaluation: means over the prompts, with 95 % confidence intervals.

A prompt is one independent observation, and the samples of a prompt are a cluster. Each prompt is
therefore estimated first, for example by the share of right samples, and the interval describes the
mean of these estimates. The prompts count as draws from all prompts of the same kind.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from lightrft.algorithms.advantage import share_of_draws
from lightrft.core.groups import Group
from lightrft.core.samples import RIGHT

Z = 1.959963984540054
"""97.5 % quantile of the normal distribution, for intervals of 95 %."""

UNSEEN = 0.5
"""How far from the mean a value may lie that has not been seen; see estimate()."""


class Estimate(NamedTuple):
    """A mean over prompts with a confidence interval, NaN where a single prompt cannot tell."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Results of one prompt that all ranks exchange."""

    index: int
    greedy: float
    """Reward of the greedy response."""
    samples: tuple[float, ...]
    """Rewards of the sampled responses."""
    length: int
    """Number of tokens of the greedy response."""
    truncated: bool
    """True if the greedy response reached --generate_max_len."""

    @classmethod
    def of(cls, group: Group) -> Self:
        """Take the numbers of a scored group that has a greedy response."""
        (greedy,) = group.others
        samples = tuple(sample.reward for sample in group.samples)
        return cls(
            greedy.prompt.index, greedy.reward, samples, len(greedy.token_ids), greedy.truncated
        )


def estimates(scores: Sequence[PromptScores]) -> dict[str, Estimate]:
    """Return each mean over the prompts by name; the order of `scores` does not matter.

    reward: mean of the greedy responses. accuracy: the same number, if every reward of the set is 0
    or 1. avg_at_N: mean of a prompt's N samples. pass_at_k: see pass_at_k(). response_length and
    truncated: of the greedy responses.
    """
    measures: dict[str, Callable[[PromptScores], float]] = {"reward": lambda one: one.greedy}
    if all(reward in (0, 1) for one in scores for reward in (one.greedy, *one.samples)):
        measures["accuracy"] = measures["reward"]
    if count := len(scores[0].samples):
        measures[f"avg_at_{count}"] = lambda one: math.fsum(one.samples) / count
    measures |= {f"pass_at_{k}": lambda one, k=k: pass_at_k(one.samples, k) for k in draws(count)}
    measures |= {
        "response_length": lambda one: float(one.length),
        "truncated": lambda one: float(one.truncated),
    }

    return {name: estimate([value(one) for one in scores]) for name, value in measures.items()}


def draws(count: int) -> list[int]:
    """Return the k of pass@k for `count` samples: 1, 2, 4, ... and `count`."""
    return sorted({2**power for power in range(count.bit_length())} | {count}) if count else []


def pass_at_k(rewards: Sequence[float], k: int) -> float:
    """Return how often k of the n rewards include a right one: 1 - C(wrong, k) / C(n, k).

    The estimate is unbiased: Chen et al., arXiv 2107.03374, equation 1.
    """
    wrong = sum(reward <= RIGHT for reward in rewards)
    counts = torch.tensor([[float(wrong)], [float(len(rewards))]])
    return 1 - float(share_of_draws(*counts, k))


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with an interval of 95 %.

    Values between 0 and 1 get the score interval of Wilson (1927) at the effective sample size
    mean * (1 - mean) / error^2, as surveys of clusters do (Korn and Graubard, 1998). It stays
    within 0 and 1, and has a width even if all values are equal: the squared error of the mean
    counts one more value, UNSEEN away from the mean, for rare values that did not occur. Other
    values get mean +- t * error, where t is the quantile of Student's distribution.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.nan, math.nan)

    squares = math.fsum((value - mean) ** 2 for value in values)
    t = student_quantile(count - 1)
    if not all(0 <= value <= 1 for value in values):
        half = t * math.sqrt(squares / (count - 1) / count)
        return Estimate(mean, mean - half, mean + half)

    size = max(mean * (1 - mean) * (count - 1) * count / (squares + UNSEEN**2), count - 1)
    scale = 1 + t**2 / size
    center = (mean + t**2 / (2 * size)) / scale
    half = t / scale * math.sqrt(mean * (1 - mean) / size + t**2 / (4 * size**2))

    return Estimate(mean, min(max(center - half, 0.0), mean), max(min(center + half, 1.0), mean))


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, by the expansion of Cornish and Fisher.

    The error is at most 0.5 % from 4 degrees of freedom on.
    """
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3
