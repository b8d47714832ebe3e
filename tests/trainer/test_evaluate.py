"""pass@k by counting all draws."""

from itertools import combinations

import pytest

from lightrft.rollout.groups import Group
from lightrft.trainer.evaluate import pass_at_k
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
