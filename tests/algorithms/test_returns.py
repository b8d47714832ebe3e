"""Why: discounting across a sequence, a gap or a rank gives the wrong credit, and looks like noise.

The numbers are worked out by hand.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.flat import make_batch
from lightrft.algorithms.advantage import explained_variance, gae, teacher_advantages, whiten
from lightrft.core.advantages import reward_to_go


def alone(total: torch.Tensor) -> torch.Tensor:
    """Stand in for the sum over all ranks where there is one rank."""
    return total


# -- reward to go


def test_what_comes_later_is_discounted_within_a_sequence():
    # 4; 2 + 0.5 * 4 = 4; 1 + 0.5 * 4 = 3 | 8
    rewards = torch.tensor([9.0, 1.0, 2.0, 4.0, 9.0, 8.0])
    result = reward_to_go(rewards, make_batch([".xxx", ".x"]), gamma=0.5)
    assert result.tolist() == [0.0, 3.0, 4.0, 4.0, 0.0, 8.0]


def test_tokens_of_tools_take_no_time():
    # x x . . x: 4 is one step after the second token, not three
    rewards = torch.tensor([0.0, 1.0, 2.0, 7.0, 7.0, 4.0])
    result = reward_to_go(rewards, make_batch([".xx..x"]), gamma=0.5)
    assert result.tolist() == [0.0, 3.0, 4.0, 0.0, 0.0, 4.0]


def test_a_reward_at_the_end_is_every_tokens_own_when_nothing_is_discounted():
    value = 0.1234567  # not a sum of powers of two
    result = reward_to_go(
        torch.tensor([0.0, 0.0, 0.0, value, 0.0, 0.3]), make_batch([".xxx", ".x"]), gamma=1.0
    )
    assert result.float().tolist() == torch.tensor([0.0, value, value, value, 0.0, 0.3]).tolist()


def test_without_a_future_only_the_present_counts():
    assert reward_to_go(torch.tensor([0.0, 1.0, 2.0]), make_batch([".xx"]), gamma=0.0).tolist() == [
        0.0,
        1.0,
        2.0,
    ]


def test_no_tokens_and_no_learned_tokens():
    assert reward_to_go(torch.zeros(0), make_batch([]), gamma=0.9).tolist() == []
    assert reward_to_go(torch.tensor([3.0]), make_batch(["."]), gamma=0.9).tolist() == [0.0]


MASKS = st.lists(st.text("x.", min_size=1, max_size=9), min_size=1, max_size=5)


@given(MASKS, st.sampled_from([1.0, 0.99, 0.5]), st.randoms(use_true_random=False))
def test_reward_to_go_is_the_recursion(masks, gamma, random):
    """G_t = r_t + gamma G_{t+1}, token by token from the end, in plain Python."""
    rewards = [[random.uniform(-2, 2) for _ in mask] for mask in masks]
    expected = []
    for mask, row in zip(masks, rewards, strict=True):
        result = [0.0] * len(mask)
        after = 0.0
        for t in reversed([t for t, letter in enumerate(mask) if letter == "x"]):
            result[t] = after = row[t] + gamma * after
        expected += result

    flat = torch.tensor([value for row in rewards for value in row], dtype=torch.float64)
    assert reward_to_go(flat, make_batch(masks), gamma=gamma).tolist() == pytest.approx(
        expected, abs=1e-12
    )


# -- gae


def test_gae_by_hand():
    # gamma 0.9, lambda 0.5. V 1, 2, 4, rewards 0, 0, 10
    # deltas: 0.9 * 2 - 1 = 0.8; 0.9 * 4 - 2 = 1.6; 10 - 4 = 6
    # A: 6; 1.6 + 0.45 * 6 = 4.3; 0.8 + 0.45 * 4.3 = 2.735; returns A + V
    batch = make_batch([".xxx"])
    rewards = torch.tensor([0.0, 0.0, 0.0, 10.0])
    values = torch.tensor([99.0, 1.0, 2.0, 4.0])
    advantages, returns = gae(rewards, values, batch, gamma=0.9, lambd=0.5)
    assert advantages.tolist() == pytest.approx([0.0, 2.735, 4.3, 6.0])
    assert returns.tolist() == pytest.approx([0.0, 3.735, 6.3, 10.0])


def test_gae_skips_tokens_of_tools_and_stops_at_the_sequence():
    gaps = [".x.xx", ".x"]
    values = torch.tensor([99.0, 1.0, 50.0, 2.0, 4.0, 99.0, 7.0])
    rewards = torch.tensor([0.0, 0.0, 30.0, 0.0, 10.0, 0.0, 8.0])
    advantages, returns = gae(rewards, values, make_batch(gaps), gamma=0.9, lambd=0.5)
    assert advantages.tolist() == pytest.approx([0.0, 2.735, 0.0, 4.3, 6.0, 0.0, 1.0])
    assert returns.tolist() == pytest.approx([0.0, 3.735, 0.0, 6.3, 10.0, 0.0, 8.0])


@given(MASKS, st.randoms(use_true_random=False))
def test_without_values_gae_is_the_reward_to_go(masks, random):
    batch = make_batch(masks)
    rewards = torch.tensor(
        [random.uniform(-2, 2) for _ in range(batch.num_tokens)], dtype=torch.float64
    )
    advantages, returns = gae(rewards, torch.zeros(batch.num_tokens), batch, gamma=0.97, lambd=1.0)
    assert advantages.tolist() == returns.tolist()
    assert advantages.tolist() == pytest.approx(
        reward_to_go(rewards, batch, gamma=0.97).tolist(), abs=1e-12
    )


@given(
    MASKS,
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([1.0, 0.95, 0.0]),
    st.randoms(use_true_random=False),
)
def test_gae_is_the_recursion(masks, gamma, lambd, random):
    batch = make_batch(masks)
    rewards, values = ([random.uniform(-2, 2) for _ in range(batch.num_tokens)] for _ in range(2))
    expected = []

    start = 0
    for mask in masks:
        result = [0.0] * len(mask)
        after = 0.0
        following = 0.0
        for t in reversed([t for t, letter in enumerate(mask) if letter == "x"]):
            delta = rewards[start + t] + gamma * following - values[start + t]
            result[t] = after = delta + gamma * lambd * after
            following = values[start + t]
        expected += result
        start += len(mask)

    tensors = (torch.tensor(numbers, dtype=torch.float64) for numbers in (rewards, values))
    assert gae(*tensors, batch, gamma=gamma, lambd=lambd)[0].tolist() == pytest.approx(
        expected, abs=1e-12
    )


# -- distillation and whitening


def test_distillation_rewards_what_the_teacher_finds_likelier():
    found = teacher_advantages(torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -0.5]))
    assert found.tolist() == [-2.0, 1.5]


def test_whitening_by_hand():
    # 1, 3, 8: mean 4, variance (9 + 1 + 16) / 3 = 26 / 3, std 2.943920
    mask = torch.tensor([True, False, True, True])
    result = whiten(torch.tensor([1.0, 77.0, 3.0, 8.0]), mask, alone)
    assert result.tolist() == pytest.approx([-1.019049, 0.0, -0.339683, 1.358732], abs=1e-6)


def test_whitening_knows_all_ranks():
    values = torch.tensor([1.0, 77.0, 3.0, 8.0])
    mask = torch.tensor([True, False, True, True])
    whole = whiten(values, mask, alone)
    seen = []
    # what the other rank adds
    whiten(values[2:], mask[2:], lambda total: seen.append(total) or total)
    others = iter([seen[0], (values[2:].double() - 4).square().sum()])
    assert (
        whiten(values[:2], mask[:2], lambda total: total + next(others)).tolist()
        == whole[:2].tolist()
    )


def test_explained_variance_by_hand_over_all_ranks():
    # returns 1, 3, 8: squares around 4 are 26; unexplained 0, 1, 2: squares around 1 are 2
    values = torch.tensor([1.0, 77.0, 2.0, 6.0])
    returns = torch.tensor([1.0, 55.0, 3.0, 8.0])
    mask = torch.tensor([True, False, True, True])
    assert explained_variance(values, returns, mask, alone).item() == pytest.approx(1 - 2 / 26)
    # of the last two, around 4 and 1
    others = iter([torch.tensor([2.0, 11.0, 3.0]), torch.tensor([17.0, 1.0])])
    local = explained_variance(
        values[:2], returns[:2], mask[:2], lambda total: total + next(others)
    )
    assert local.item() == pytest.approx(1 - 2 / 26)
    assert not explained_variance(values, torch.ones(4), mask, alone).isfinite()
    assert not explained_variance(
        values, returns, torch.zeros(4, dtype=torch.bool), alone
    ).isfinite()


@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.3])
def test_equal_values_become_zero(value):
    assert (
        whiten(torch.full((5,), value), torch.ones(5, dtype=torch.bool), alone).tolist()
        == [0.0] * 5
    )
    assert (
        whiten(torch.full((5,), value), torch.zeros(5, dtype=torch.bool), alone).tolist()
        == [0.0] * 5
    )
