"""Why: a wrong baseline trains silently in the wrong direction. Group advantages against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightrft.algorithms.advantage import estimators, grpo

REWARDS = st.lists(st.tuples(st.integers(0, 3), st.floats(-100, 100, width=32)), min_size=1, max_size=12)
"""(group, reward) of each sample."""


def advantages(rewards: list[float], groups: list[int], **options: float) -> list[float]:
    return grpo(torch.tensor(rewards), torch.tensor(groups), **options).tolist()


def test_two_right_of_four():
    # mean 0.5, unbiased variance 4 * 0.25 / 3 = 1/3, so 0.5 / (0.577350 + 0.0001) = 0.865875
    assert advantages([1.0, 0.0, 0.0, 1.0], [7, 7, 7, 7]) == pytest.approx([0.865875, -0.865875, -0.865875, 0.865875], abs=1e-6)


def test_unequal_rewards():
    # mean 3, deviations -2, -1, 3; unbiased variance 14 / 2 = 7, std 2.645751
    expected = [-0.755900, -0.377950, 1.133850]
    assert advantages([1.0, 2.0, 6.0], [0, 0, 0]) == pytest.approx(expected, abs=1e-6)


def test_groups_of_different_size_may_be_interleaved():
    # group 5: 1, 2, 6 as above; group 2: 0, 4 has mean 2, std sqrt(8) = 2.828427
    expected = [-0.755900, -0.707082, -0.377950, 0.707082, 1.133850]
    assert advantages([1.0, 0.0, 2.0, 4.0, 6.0], [5, 2, 5, 2, 5]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3, 1000.1])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_group_of_equal_rewards_teaches_nothing(reward, size):
    assert advantages([reward] * size + [1.0, 2.0], [0] * size + [1, 1])[:size] == [0.0] * size


def test_eps_bounds_the_advantage_of_a_nearly_equal_group():
    # std 0.7071e-6 of 0 and 1e-6: without eps +-0.707, with 1e-4 it is 0.5e-6 / 1.007071e-4
    assert advantages([0.0, 1e-6], [0, 0]) == pytest.approx([-0.00496489, 0.00496489], rel=1e-5)
    assert advantages([0.0, 2.0], [0, 0], eps=1.0) == pytest.approx([-0.414214, 0.414214], abs=1e-6)  # 1 / (sqrt 2 + 1)


def test_result_is_float32_and_group_norm_is_the_same_estimator():
    assert grpo(torch.tensor([0.0, 1.0]), torch.tensor([0, 0])).dtype == torch.float32
    assert estimators["group_norm"] is estimators["grpo"] is grpo


@given(REWARDS, st.randoms(use_true_random=False))
def test_permuting_the_samples_permutes_the_advantages(samples, random):
    order = list(range(len(samples)))
    random.shuffle(order)
    groups, rewards = zip(*samples, strict=True)
    plain = advantages(list(rewards), list(groups))
    shuffled = advantages([rewards[i] for i in order], [groups[i] for i in order])
    assert shuffled == pytest.approx([plain[i] for i in order], abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-64, 64)), min_size=1, max_size=12), st.integers(-1000, 1000))
def test_shifting_all_rewards_changes_nothing(samples, shift):
    groups, rewards = zip(*samples, strict=True)
    plain = advantages([float(r) for r in rewards], list(groups))
    assert advantages([float(r + shift) for r in rewards], list(groups)) == pytest.approx(plain, abs=1e-6)


@given(REWARDS)
def test_every_group_has_mean_zero_and_no_more_than_unit_deviation(samples):
    groups, rewards = zip(*samples, strict=True)
    result = advantages(list(rewards), list(groups))
    for group in set(groups):
        mine = [a for a, g in zip(result, groups, strict=True) if g == group]
        assert sum(mine) == pytest.approx(0, abs=1e-5)
        assert math.sqrt(sum(a * a for a in mine) / max(len(mine) - 1, 1)) <= 1 + 1e-5
