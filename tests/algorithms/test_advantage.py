"""Why: a wrong baseline trains silently in the wrong direction.

Every estimator is compared with numbers worked out by hand.
"""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightrft.algorithms.advantage import estimators
from lightrft.config import COMPARING
from lightrft.core.advantages import grpo
from lightrft.core.table import keywords

REWARDS = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-100, 100, width=32)), min_size=1, max_size=12
)
"""(group, reward) of each sample."""
SAMPLES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(-64, 64), st.integers(1, 50)), min_size=1, max_size=12
)
"""(group, reward, length)."""


def estimate(name: str, rewards: list[float], groups: list[int], **options) -> list[float]:
    return estimators[name](torch.tensor(rewards), torch.tensor(groups), **options).tolist()


def advantages(rewards: list[float], groups: list[int], **options: float) -> list[float]:
    return estimate("grpo", rewards, groups, **options)


def compare(name: str, samples: list[tuple[int, float, int]]) -> list[float]:
    """Compare an estimator with the expected advantages.

    It gets whatever it names beside rewards and groups.
    """
    groups, rewards, lengths = zip(*samples, strict=True)
    given = {"lengths": torch.tensor(lengths), "pass_k": 2, "responses": torch.arange(len(samples))}
    # the reward and a constant, which is normalised to nothing
    given["components"] = torch.tensor([[float(reward), 0.25] for reward in rewards])
    given["component_weights"] = torch.tensor([1.0, 2.0])
    named = {keyword: given[keyword] for keyword in keywords(estimators[name]) if keyword in given}
    return estimate(name, [float(reward) for reward in rewards], list(groups), **named)


# -- grpo


def test_two_right_of_four():
    # mean 0.5, unbiased variance 4 * 0.25 / 3 = 1/3, so 0.5 / (0.577350 + 0.0001) = 0.865875
    assert advantages([1.0, 0.0, 0.0, 1.0], [7, 7, 7, 7]) == pytest.approx(
        [0.865875, -0.865875, -0.865875, 0.865875], abs=1e-6
    )


def test_unequal_rewards():
    # mean 3, deviations -2, -1, 3; unbiased variance 14 / 2 = 7, std 2.645751
    expected = [-0.755900, -0.377950, 1.133850]
    assert advantages([1.0, 2.0, 6.0], [0, 0, 0]) == pytest.approx(expected, abs=1e-6)


def test_groups_of_different_size_may_be_interleaved():
    # group 5: 1, 2, 6 as above; group 2: 0, 4 has mean 2, std sqrt(8) = 2.828427
    expected = [-0.755900, -0.707082, -0.377950, 0.707082, 1.133850]
    assert advantages([1.0, 0.0, 2.0, 4.0, 6.0], [5, 2, 5, 2, 5]) == pytest.approx(
        expected, abs=1e-6
    )


def test_eps_bounds_the_advantage_of_a_nearly_equal_group():
    # std 0.7071e-6 of 0 and 1e-6: without eps +-0.707, with 1e-4 it is 0.5e-6 / 1.007071e-4
    assert advantages([0.0, 1e-6], [0, 0]) == pytest.approx([-0.00496489, 0.00496489], rel=1e-5)
    # 1 / (sqrt 2 + 1)
    assert advantages([0.0, 2.0], [0, 0], eps=1.0) == pytest.approx([-0.414214, 0.414214], abs=1e-6)


@given(REWARDS)
def test_every_group_has_mean_zero_and_no_more_than_unit_deviation(samples):
    groups, rewards = zip(*samples, strict=True)
    result = advantages(list(rewards), list(groups))
    for group in set(groups):
        mine = [a for a, g in zip(result, groups, strict=True) if g == group]
        assert sum(mine) == pytest.approx(0, abs=1e-5)
        assert math.sqrt(sum(a * a for a in mine) / max(len(mine) - 1, 1)) <= 1 + 1e-5


# -- the others


def test_without_a_baseline_the_reward_itself():
    assert estimate("reinforce", [1.0, -2.0, 0.5], [0, 0, 1]) == [1.0, -2.0, 0.5]


def test_the_group_mean_alone():
    # group 0: 1, 2, 6 has mean 3; group 1: 0, 4 has mean 2
    assert estimate("dr_grpo", [1.0, 0.0, 2.0, 4.0, 6.0], [0, 1, 0, 1, 0]) == [
        -2.0,
        -2.0,
        -1.0,
        2.0,
        3.0,
    ]


def test_the_mean_of_the_others():
    # of 1, 2, 6: 1 - 4, 2 - 3.5, 6 - 1.5; of 0, 4: 0 - 4, 4 - 0; alone: nothing to compare with
    result = estimate(
        "rloo", [1.0, 0.0, 2.0, 4.0, 6.0, 9.0], [0, 1, 0, 1, 0, 2], responses=torch.arange(6)
    )
    assert result == [-3.0, -4.0, -1.5, 4.0, 4.5, 0.0]


def test_a_response_with_several_rewards_is_left_out_whole():
    # group 0: responses with 1, 3 (mean 2), with 5, and with 2, 6, 1 (mean 3); the others' means
    # are (5 + 3) / 2 = 4, (2 + 3) / 2 = 2.5 and (2 + 5) / 2 = 3.5. Group 1: a response alone, with
    # 7 and 9
    rewards = [1.0, 3.0, 7.0, 9.0, 5.0, 2.0, 6.0, 1.0]
    groups = [0, 0, 1, 1, 0, 0, 0, 0]
    responses = torch.tensor([4, 4, 5, 5, 6, 7, 7, 7])
    assert estimate("rloo", rewards, groups, responses=responses) == [
        -3.0,
        -1.0,
        0.0,
        0.0,
        2.5,
        -1.5,
        2.5,
        -2.5,
    ]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3])
def test_equal_rewards_of_many_steps_teach_nothing(reward):
    responses = torch.tensor([0] * 3 + [1] * 49 + [2] * 7)
    assert estimate("rloo", [reward] * 59, [0] * 59, responses=responses) == [0.0] * 59


def test_the_mean_weighted_with_lengths():
    # (10 * 1 + 30 * 0) / 40 = 0.25; (1 * 2 + 2 * 5 + 1 * 4) / 4 = 4
    lengths = torch.tensor([10, 1, 30, 2, 1])
    assert estimate("opo", [1.0, 2.0, 0.0, 5.0, 4.0], [0, 1, 0, 1, 1], lengths=lengths) == [
        0.75,
        -2.0,
        -0.25,
        1.0,
        0.0,
    ]


def test_responses_without_tokens_weigh_nothing():
    lengths = torch.tensor([0, 4, 0])
    assert estimate("opo", [7.0, 2.0, 1.0], [0, 0, 1], lengths=lengths) == [5.0, 0.0, 1.0]


def test_the_greedy_response():
    greedy = torch.tensor([0.5, 0.5, -1.0])
    assert estimate("remax", [1.0, 0.0, -1.0], [0, 0, 1], greedy_rewards=greedy) == [0.5, -0.5, 0.0]


def test_one_right_of_four_in_draws_of_two():
    # 3 wrong of 4: C(3,2)/C(4,2) = 1/2 of the draws fail, sigma 1/2. Right: 1. Wrong: with it
    # C(2,1)/C(3,1) = 2/3 fail, -1/3
    result = estimate("pass_at_k", [0.0, 1.0, 0.0, 0.0], [3, 3, 3, 3], pass_k=2)
    assert result == pytest.approx([-1 / 3, 1.0, -1 / 3, -1 / 3], abs=1e-12)


def test_where_every_or_no_draw_fails_nothing_is_learned():
    # one wrong of three: every draw of two has a right one. All wrong, all right: no difference
    rewards = [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert estimate("pass_at_k", rewards, [0, 0, 0, 1, 1, 2, 2], pass_k=2) == [0.0] * 7


@given(st.lists(st.booleans(), min_size=2, max_size=7), st.integers(1, 4))
def test_pass_at_k_is_the_mean_over_all_draws(right, k):
    """The paper's definition, by counting: a draw is worth 1 when a sample in it is right,
    standardised over all draws.
    """
    if k > len(right):
        return

    draws = list(combinations(range(len(right)), k))
    worth = [float(any(right[i] for i in draw)) for draw in draws]
    mean = sum(worth) / len(worth)

    sigma = math.sqrt(mean * (1 - mean))
    expected = []
    for i in range(len(right)):
        mine = [value for draw, value in zip(draws, worth, strict=True) if i in draw]
        expected.append((sum(mine) / len(mine) - mean) / sigma if sigma > 0 else 0.0)

    result = estimate("pass_at_k", [float(r) for r in right], [0] * len(right), pass_k=k)
    assert result == pytest.approx(expected, abs=1e-9)


def test_each_component_is_normalised_and_weighed_before_the_sum():
    # group 0: right 1, 0, 0 has mean 1/3 and std 0.577350: 1.154701, -0.577350, -0.577350; short
    # 2 (0, 1, 1), weight 2, mean 4/3, std 1.154701: twice -1.154701, 0.577350, 0.577350. Sums:
    # -1.154701, 0.577350, 0.577350. Group 1: right 1, 1 gives 0; short 2 (1, 0): twice +-0.707107.
    # std of the five sums: squares 1.333333 + 2 * 0.333333 + 2 * 2 = 6, / 4, root 1.224745
    components = [[1.0, 0.0], [0.0, 2.0], [0.0, 2.0], [1.0, 2.0], [1.0, 0.0]]
    result = estimate(
        "gdpo",
        [1.0, 2.0, 2.0, 3.0, 1.0],
        [0, 0, 0, 1, 1],
        components=torch.tensor(components),
        component_weights=torch.tensor([1.0, 2.0]),
        eps=1e-12,
    )
    sums = [-1.154701, 0.577350, 0.577350, 1.414214, -1.414214]
    assert result == pytest.approx([one / 1.224745 for one in sums], abs=1e-6)


def test_combinations_with_equal_totals_stay_apart():
    # the paper's point: totals 1, 1 are one advantage for grpo. Right 1, 0, 0, 0: 1.5 and -0.5;
    # tidy 0, 1, 1, 0: -+0.866025. Sums 0.633975, 0.366025, 0.366025, -1.366025
    components = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    weights = torch.ones(2)
    first, second, third, last = estimate(
        "gdpo",
        [1.0, 1.0, 1.0, 0.0],
        [0, 0, 0, 0],
        components=components,
        component_weights=weights,
        eps=1e-12,
    )
    assert second == third and first / second == pytest.approx(0.633975 / 0.366025, abs=1e-5)
    assert last / first == pytest.approx(-1.366025 / 0.633975, abs=1e-5)
    totals = estimate("grpo", [1.0, 1.0, 1.0, 0.0], [0, 0, 0, 0])
    assert totals[0] == totals[1]


def test_a_negative_weight_is_a_penalty():
    # the component has its weight: -0.5 (1, 0)
    result = estimate(
        "gdpo",
        [-0.5, 0.0],
        [0, 0],
        components=torch.tensor([[-0.5], [0.0]]),
        component_weights=torch.tensor([-0.5]),
        eps=1e-12,
    )
    assert result == pytest.approx([-0.707107, 0.707107], abs=1e-6)


def test_the_group_mean_and_the_deviation_of_the_whole_step():
    # means 0.5, 3 and 1; of all five 1.6, squares 2.56 + 0.36 + 0.16 + 5.76 + 0.36 = 9.2
    result = estimate("lite_ppo", [0.0, 1.0, 2.0, 4.0, 1.0], [0, 0, 1, 1, 2], eps=1e-12)
    std = math.sqrt(9.2 / 4)
    expected = [-0.5 / std, 0.5 / std, -1 / std, 1 / std, 0.0]
    assert result == pytest.approx(expected, abs=1e-9)


def test_the_mean_and_the_deviation_of_the_whole_step():
    # the same five rewards: of all of them 1.6
    result = estimate("prpo", [0.0, 1.0, 2.0, 4.0, 1.0], [0, 0, 1, 1, 2], eps=1e-12)
    std = math.sqrt(9.2 / 4)
    assert result == pytest.approx([each / std for each in (-1.6, -0.6, 0.4, 2.4, -0.6)], abs=1e-9)


def test_rare_right_responses_count_more():
    # means 1/4 and 1/2, and a group without a right response: (1 - 1/4) / (1/4) = 3, -1; 1, -1; 0
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    result = estimate("maxrl", rewards, [0, 0, 0, 0, 1, 1, 2, 2])
    assert result == pytest.approx([3.0, -1.0, -1.0, -1.0, 1.0, -1.0, 0.0, 0.0], abs=1e-12)


def test_groups_without_a_spread_are_made_up_for():
    # two of five samples have a gradient: 5 / 2 times +-0.5
    result = estimate("gpg", [1.0, 0.0, 1.0, 1.0, 0.0], [0, 0, 1, 1, 2])
    assert result == pytest.approx([1.25, -1.25, 0.0, 0.0, 0.0], abs=1e-12)
    assert estimate("gpg", [1.0, 1.0], [0, 0]) == [0.0, 0.0]


def spread(name: str, rewards: list[float], groups: list[int], responses: list[int]) -> list:
    """Return what tokens of each turn get: the sum of the values from it on."""
    values = estimate(name, rewards, groups, responses=torch.tensor(responses), eps=1e-12)
    return [
        sum(
            v
            for v, r in zip(values[index:], responses[index:], strict=True)
            if r == responses[index]
        )
        for index in range(len(values))
    ]


def test_each_turn_is_compared_with_the_same_turn():
    # responses with rewards 1, 0, 2 and 0, 4 and 1, 3. Returns 3, 2, 2; 4, 4; 4, 3. First turns 3,
    # 4, 4: mean 3.666667, std 0.577350: -1.154701, 0.577350, 0.577350. Second 2, 4, 3: mean 3, std
    # 1: -1, 1, 0. The third turn has nothing to be compared with. Another group: 5 and 1, alone.
    rewards = [1.0, 0.0, 2.0, 0.0, 4.0, 1.0, 3.0, 5.0, 1.0]
    found = spread("turn_grpo", rewards, [0] * 7 + [1] * 2, [4, 4, 4, 5, 5, 6, 6, 7, 7])
    expected = [-1.154701, -1.0, 0.0, 0.577350, 1.0, 0.577350, 0.0, 0.0, 0.0]
    assert found == pytest.approx(expected, abs=1e-6)


@given(REWARDS)
def test_of_single_turns_it_is_grpo(samples):
    groups, rewards = zip(*samples, strict=True)
    single = torch.arange(len(rewards))
    found = estimate("turn_grpo", list(rewards), list(groups), responses=single)
    assert found == pytest.approx(advantages(list(rewards), list(groups)), abs=1e-4)


# -- what all of them have in common

OF_THE_STEP = {"gdpo", "gpg", "lite_ppo"}
"""Estimators with a statistic of all groups."""


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3, 1000.1])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_group_of_equal_rewards_teaches_nothing(name, reward, size):
    samples = [(0, reward, 1 + i) for i in range(size)] + [(1, 1.0, 5), (1, 2.0, 9)]
    assert compare(name, samples)[:size] == [0.0] * size


@pytest.mark.parametrize("name", ["reinforce", *COMPARING])
@given(samples=SAMPLES, random=st.randoms(use_true_random=False))
def test_permuting_the_samples_permutes_the_advantages(name, samples, random):
    order = list(range(len(samples)))
    random.shuffle(order)
    plain = compare(name, samples)
    assert compare(name, [samples[i] for i in order]) == pytest.approx(
        [plain[i] for i in order], abs=1e-6
    )


@pytest.mark.parametrize("name", [name for name in COMPARING if name not in ("pass_at_k", "maxrl")])
@given(samples=SAMPLES, shift=st.integers(-1000, 1000))
def test_shifting_all_rewards_changes_nothing(name, samples, shift):
    shifted = [(group, reward + shift, length) for group, reward, length in samples]
    assert compare(name, shifted) == pytest.approx(compare(name, samples), abs=1e-6)


@pytest.mark.parametrize("name", [name for name in COMPARING if name not in OF_THE_STEP])
@given(samples=SAMPLES)
def test_other_groups_do_not_matter(name, samples):
    mine = [sample for sample in samples if sample[0] == samples[0][0]]
    together = [
        a for a, sample in zip(compare(name, samples), samples, strict=True) if sample in mine
    ]
    assert together == pytest.approx(compare(name, mine), abs=1e-9)


def test_every_estimator_is_tested_here():
    known = {
        *COMPARING,
        "reinforce",
        "reinforce++",
        "prpo",
        "gae",
        "ppo",
        "distill",
        "gkd",
        "remax",
        "stable_reinforce",
    }
    assert set(estimators.names()) == known


def test_distillation_takes_no_advantage_from_rewards():
    rewards = torch.tensor([1.0, 0.0, 5.0], dtype=torch.float64)
    assert estimators["distill"](rewards, torch.tensor([0, 0, 1])).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "names",
    [
        ("grpo", "group_norm", "gspo", "gmpo", "cispo", "sapo", "cpgd", "dppo"),
        ("dr_grpo", "reinforce++_baseline", "reinforce_baseline", "dro"),
        ("reinforce", "reinforce++", "gae", "ppo", "stable_reinforce"),
    ],
)
def test_names_of_one_estimator(names):
    assert len({estimators[name] for name in names}) == 1
    assert estimators["grpo"] is grpo
