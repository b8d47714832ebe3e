"""pass@k by counting all draws."""

from itertools import combinations
from types import SimpleNamespace

import pytest

from lightrft.observe.metrics import Metrics
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


@pytest.mark.parametrize("mine, others, accuracy", [
    ([1.0, 0.0], True, 0.5), ([1.0, 0.5], True, None), ([1.0, 0.0], False, None), ([0.0, 7.0], True, None), ([], True, None),
])
def test_a_mean_reward_is_an_accuracy_where_all_rewards_of_all_ranks_say_right_or_wrong(mine, others, accuracy):
    groups = [Group.begin(i, 0, Prompt(0, "", [1]), count=0, greedy=True) for i in range(len(mine))]

    def judge(samples):
        for sample, reward in zip(samples, mine, strict=True):
            sample.reward = reward

    metrics, ranks = Metrics(), SimpleNamespace(gather=lambda value: [value, others])
    evaluate(groups, judge, metrics, ranks)
    row = metrics.reduce(SimpleNamespace(gather=lambda value: [value]))
    assert row.get("eval/reward") == (sum(mine) / len(mine) if mine else None)
    assert row.get("eval/accuracy") == accuracy
