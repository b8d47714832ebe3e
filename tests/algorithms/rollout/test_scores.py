"""pass@k by counting all draws, and intervals that contain the truth as often as they promise."""

import math
from itertools import combinations

import numpy as np
import pytest

from lightrft.algorithms.rollout.scores import (
    PromptScores,
    draws,
    estimate,
    estimates,
    pass_at_k,
    student_quantile,
)
from lightrft.core.groups import Group
from lightrft.core.samples import Prompt


@pytest.mark.parametrize(
    "rewards", [[1, 0, 0, 0, 1, 0], [0, 0, 0], [1, 1], [1], [0, 1, 0.5, 0, 0, 0, 0, 0]], ids=str
)
def test_pass_at_k_is_the_share_of_draws(rewards):
    assert (
        draws(len(rewards)) == sorted({k for k in (1, 2, 4, 8, len(rewards)) if k <= len(rewards)})
        and draws(0) == []
    )
    for k in draws(len(rewards)):
        every = [any(reward > 0.5 for reward in draw) for draw in combinations(rewards, k)]
        assert pass_at_k(rewards, k) == pytest.approx(sum(every) / len(every))


def scores(*rewards: tuple[float, ...]) -> list[PromptScores]:
    return [
        PromptScores(index, greedy, samples, 3 + index, index == 0)
        for index, (greedy, *samples) in enumerate(rewards)
        for samples in [tuple(samples)]
    ]


def test_every_mean_by_hand():
    found = {
        name: value.mean
        for name, value in estimates(scores((1, 1, 1, 0, 0), (0, 0, 0, 0, 1))).items()
    }
    # draws of two: prompt 0 has 2 of 4 right, 5/6 of the pairs; prompt 1 has 1 of 4, 3/6
    assert found == pytest.approx(
        {
            "reward": 0.5,
            "accuracy": 0.5,
            "avg_at_4": 3 / 8,
            "pass_at_1": 3 / 8,
            "pass_at_2": 2 / 3,
            "pass_at_4": 1.0,
            "response_length": 3.5,
            "truncated": 0.5,
        }
    )


@pytest.mark.parametrize("rewards", [[(1.0,), (0.5,)], [(1.0, 1.0), (0.0, 7.0)]])
def test_a_mean_reward_is_an_accuracy_only_if_all_rewards_are_right_or_wrong(rewards):
    assert "accuracy" not in estimates(scores(*rewards))


def test_the_numbers_of_a_group():
    group = Group.begin(4, 4, Prompt(4, "", [1]), 2, others=1)
    for sample, reward in zip(group.responses, (0.5, 1.0, 0.25), strict=True):
        sample.reward = reward
        sample.token_ids = [1] * int(4 * reward)
    group.others[0].finish_reason = "length"
    assert PromptScores.of(group) == PromptScores(4, 0.25, (0.5, 1.0), 1, True)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(4, 2.7764), (9, 2.2622), (29, 2.0452), (499, 1.9647)]
)
def test_quantiles_of_students_distribution(freedom, quantile):
    assert student_quantile(freedom) == pytest.approx(quantile, rel=5e-3)


def test_intervals_by_hand():
    """Without clusters, Wilson's formula for 8 of 10 at n - 1 = 9 and t = 2.262."""
    t2 = 2.2622**2
    n = 9
    p = 0.8
    center = (p + t2 / (2 * n)) / (1 + t2 / n)
    half = math.sqrt(t2) / (1 + t2 / n) * math.sqrt(p * (1 - p) / n + t2 / (4 * n * n))
    assert estimate([1.0] * 8 + [0.0] * 2) == pytest.approx(
        (p, center - half, center + half), rel=1e-3
    )
    mean, low, high = estimate([1.0] * 50)
    assert mean == high == 1 and 0.9 < low < 0.95, (
        "fifty right answers do not prove that all are right"
    )

    assert estimate([3.0, 5.0, 4.0, 4.0, 9.0]) == pytest.approx(
        (5.0, 5 - 2.7764 * 1.04881, 5 + 2.7764 * 1.04881), rel=1e-2
    )
    mean, low, high = estimate([0.25])
    assert mean == 0.25 and math.isnan(low) and math.isnan(high)


@pytest.mark.parametrize("beta", [(2.0, 2.0), (0.3, 0.3), (0.5, 6.0), (6.0, 0.5)], ids=str)
@pytest.mark.parametrize("prompts", [30, 200])
def test_intervals_contain_the_truth_in_95_of_100_evaluations(beta, prompts):
    """There are 600 evaluations of prompts of different difficulty, with eight samples of each.

    They report greedy accuracy, avg@8 and pass@4.
    """
    random = np.random.default_rng(prompts)
    solved = random.beta(*beta, size=200_000)
    truth = {"greedy": solved.mean(), "avg": solved.mean(), "pass": (1 - (1 - solved) ** 4).mean()}
    share_of_draws = [pass_at_k([1.0] * right + [0.0] * (8 - right), 4) for right in range(9)]
    hits = dict.fromkeys(truth, 0)
    naive = 0

    rounds = 600
    for _ in range(rounds):
        rates = random.choice(solved, prompts)
        right = random.binomial(8, rates)
        found = {
            "greedy": random.binomial(1, rates),
            "avg": right / 8,
            "pass": np.array(share_of_draws)[right],
        }

        for name, values in found.items():
            _, low, high = estimate(values.tolist())
            hits[name] += low <= truth[name] <= high

        mean = right.mean() / 8
        naive += abs(mean - truth["avg"]) <= 1.96 * math.sqrt(mean * (1 - mean) / (8 * prompts))

    assert all(0.93 <= count / rounds <= 0.995 for count in hits.values()), {
        name: hits[name] / rounds for name in hits
    }
    assert naive / rounds < 0.9, "samples of one prompt are not independent"
