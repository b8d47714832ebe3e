"""Why: rewards shaped per rank, or with statistics of the wrong samples, differ between layouts."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightrft.algorithms.shaping import RewardShaper, RunningMoments, overlong_penalty
from lightrft.config import RewardSection


def shaped(
    rewards: list[float],
    groups: list[int] | None = None,
    lengths: list[int] | None = None,
    **fields,
) -> list[float]:
    shaper = RewardShaper(RewardSection(**fields), longest=100)
    count = len(rewards)
    return shaper(
        torch.tensor(rewards),
        torch.tensor(groups or [0] * count),
        torch.tensor(lengths or [1] * count, dtype=torch.float64),
    ).tolist()


def test_nothing_is_shaped_unless_asked():
    assert shaped([1.0, -3.0, 0.1]) == torch.tensor([1.0, -3.0, 0.1]).tolist()


def test_the_overlong_penalty_grows_linearly():
    # longest 100, buffer 20: 0 up to 80, half at 90, all at 100; a step that is not the last has
    # length 0
    lengths = torch.tensor([0, 79, 80, 85, 90, 100, 120])
    penalty = overlong_penalty(lengths, longest=100, buffer=20, factor=2.0)
    assert penalty.tolist() == [0.0, 0.0, 0.0, -0.5, -1.0, -2.0, -2.0]
    fields = {
        "overlong_buffer": True,
        "overlong_buffer_len": 20,
        "overlong_buffer_penalty_factor": 0.5,
    }
    assert shaped([1.0, 1.0], lengths=[80, 95], **fields) == [1.0, 0.625]


def test_running_norm_by_hand():
    # all rewards so far: 1, 3 (mean 2, std 1), then with 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4
    # = 5
    plain = RewardShaper(RewardSection(reward_running_norm=True), longest=9)
    centered = RewardShaper(
        RewardSection(reward_running_norm=True, reward_running_norm_minus_mean=True), longest=9
    )
    groups = torch.zeros(2)
    lengths = torch.zeros(2)
    assert plain(torch.tensor([1.0, 3.0]), groups, lengths).tolist() == [1.0, 3.0]
    assert plain(torch.tensor([5.0, 7.0]), groups, lengths).tolist() == pytest.approx(
        [5 / 5**0.5, 7 / 5**0.5]
    )
    assert centered(torch.tensor([1.0, 3.0]), groups, lengths).tolist() == [-1.0, 1.0]
    assert centered(torch.tensor([5.0, 7.0]), groups, lengths).tolist() == pytest.approx(
        [1 / 5**0.5, 3 / 5**0.5]
    )


def test_equal_rewards_are_not_blown_up():
    # 0.1 is no binary fraction: the mean of three of them is another number in float64
    for equal in ([2.0, 2.0], [0.1] * 3, [0.7] * 1000):
        rewards = torch.tensor(equal, dtype=torch.float64)
        nothing = torch.zeros(len(equal))
        shaper = RewardShaper(RewardSection(reward_running_norm=True), longest=9)
        assert (
            shaper(rewards, nothing, nothing).tolist() == rewards.float().tolist()
            and shaper.moments.std == 0
        )

    assert shaped([2.0, 2.0], reward_running_norm=True, reward_running_norm_minus_mean=True) == [
        0.0,
        0.0,
    ]


def test_the_clip_comes_after_the_norm():
    # std of 0, 0, 0, 8 is sqrt 12 = 3.4641, so 8 becomes 2.3094
    rewards = [0.0, 0.0, 0.0, 8.0]
    assert shaped(rewards, reward_clip=2.5) == [0.0, 0.0, 0.0, 2.5]
    assert shaped(rewards, reward_clip=2.5, reward_running_norm=True) == pytest.approx(
        [0.0, 0.0, 0.0, 2.3094], abs=1e-4
    )
    assert shaped([-9.0], reward_clip=2.5) == [-2.5]


def test_groups_are_standardised_last():
    # 1, 3: mean 2, unbiased std sqrt 2; the clip at 3 comes before
    result = shaped([1.0, 5.0, 9.0], groups=[0, 1, 0], reward_group_norm=True, reward_clip=3.0)
    assert result == pytest.approx([-0.707057, 0.0, 0.707057], abs=1e-6)


@given(st.lists(st.lists(st.floats(-50, 50), max_size=5), min_size=1, max_size=6))
def test_running_moments_are_those_of_everything_so_far(steps):
    moments = RunningMoments()
    so_far = []
    for step in steps:
        moments.update(torch.tensor(step, dtype=torch.float64))
        so_far += step
    assert moments.count == len(so_far)
    if so_far:
        assert moments.mean == pytest.approx(statistics.fmean(so_far), abs=1e-9)
        assert moments.std == pytest.approx(statistics.pstdev(so_far), abs=1e-6)


def test_a_shaper_continues_where_another_stopped():
    first, second = (
        RewardShaper(RewardSection(reward_running_norm=True), longest=9) for _ in range(2)
    )
    step = (torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3), torch.zeros(3))
    first(*step)
    second.load_state_dict(first.state_dict())
    assert second(*step).tolist() == first(*step).tolist()
    assert (
        second.state_dict()
        == first.state_dict()
        != RewardShaper(RewardSection(), longest=9).state_dict()
    )
