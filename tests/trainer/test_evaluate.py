"""pass@k by counting all draws."""

from itertools import combinations
from types import SimpleNamespace

import pytest

from lightrft.config import RewardSection
from lightrft.observe.metrics import Metrics
from lightrft.rewards.runner import RewardRunner
from lightrft.rollout.groups import Group
from lightrft.trainer.evaluate import evaluate, pass_at_k
from lightrft.types import Prompt


@pytest.mark.parametrize("rewards", [[1, 0, 0, 0, 1, 0], [0, 0, 0], [1, 1], [1], [0, 1, 0.5, 0, 0, 0, 0, 0], []], ids=str)
def test_pass_at_k_is_the_share_of_draws(rewards):
    group = Group.begin(0, 0, Prompt(0, "", [1]), count=len(rewards), greedy=True)
    for sample, reward in zip(group.samples, rewards, strict=True):
        sample.reward = reward
    found = pass_at_k(group)
    assert set(found) == {k for k in (1, 2, 4, 8, len(rewards)) if 0 < k <= len(rewards)}
    for k, share in found.items():
        draws = [any(reward > 0.5 for reward in draw) for draw in combinations(rewards, k)]
        assert share == pytest.approx(sum(draws) / len(draws))


def of_row(samples, value, **columns):
    return value


@pytest.mark.parametrize("mine, others, accuracy", [
    ([1.0, 0.0], True, 0.5), ([1.0, 0.5], True, None), ([1.0, 0.0], False, None), ([0.0, 7.0], True, None), ([], True, None),
])
def test_a_mean_reward_is_an_accuracy_where_all_rewards_of_all_ranks_say_right_or_wrong(mine, others, accuracy):
    groups = [Group.begin(0, 0, Prompt(0, "", [1], {"value": reward}), count=0, greedy=True) for reward in mine]
    rewards = RewardRunner(f"{__name__}:of_row", section=RewardSection(reward_workers=0))
    metrics, ranks = Metrics(), SimpleNamespace(gather=lambda value: [value, others])
    evaluate(groups, rewards, metrics, ranks)
    row = metrics.reduce(SimpleNamespace(gather=lambda value: [value]))
    assert row.get("eval/reward") == (sum(mine) / len(mine) if mine else None)
    assert row.get("eval/accuracy") == accuracy
