"""Why: people steer by these numbers; each is worked out by hand, over samples of several ranks."""

from typing import Any

import pytest
import torch

from lightrft.algorithms.rollout.measures import measure_turns_and_drafts
from lightrft.core.batch import Experience
from lightrft.core.experience import measure_experience
from lightrft.core.groups import SOLVED, measure_groups, measure_samples
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Drafts, Prompt, Sample


class Ranks:
    """What others have gathered, as an axis would."""

    def __init__(self, *others: Any):
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


def reduced(metrics: Metrics) -> dict[str, float]:
    return metrics.reduce(Ranks())


def sample(reward: float, length: int, version: int = 3, finish: str = "stop") -> Sample:
    values = [5] * length, [0.0] * length, "", finish, [version] * length
    return Sample(Prompt(0, "", [1, 2]), 0, *values, reward=reward)


def test_samples():
    metrics = Metrics()
    changing = sample(0.0, 4, version=1)
    changing.weight_versions[3] = 2
    measure_samples([sample(1.0, 2), changing, sample(0.5, 9, finish="length")], 3, metrics)
    # rewards 1, 0, 0.5: mean 0.5, population variance 1/6; lengths 2, 4, 9: mean 5, variance 26/3;
    # tokens with 2 of the prompt
    assert reduced(metrics) == pytest.approx(
        {
            "rollout/reward": 0.5,
            "rollout/reward_std": (1 / 6) ** 0.5,
            "rollout/reward_min": 0.0,
            "rollout/reward_max": 1.0,
            "rollout/response_length": 5.0,
            "rollout/response_length_std": (26 / 3) ** 0.5,
            "rollout/response_length_min": 2.0,
            "rollout/response_length_max": 9.0,
            "rollout/truncated": 1 / 3,
            "rollout/staleness": 7 / 15,
            "rollout/staleness_max": 2.0,
            "rollout/tokens": 21.0,
            "rollout/off_policy_tokens": 4 / 15,
        }
    )


def test_components_of_rewards_are_means_over_those_that_have_them():
    samples = [sample(1.1, 2), sample(0.1, 2), sample(0.0, 2)]
    samples[0].reward_components = {"format": 0.1, "answer": 1.0}
    samples[1].reward_components = {"format": 0.5}
    metrics = Metrics()
    measure_samples(samples, 3, metrics)
    found = reduced(metrics)
    assert (
        found["rollout/reward_of_format"] == pytest.approx(0.3)
        and found["rollout/reward_of_answer"] == 1.0
    )


def test_drafts_of_all_samples_are_counted_together():
    samples = [sample(1.0, 2), sample(0.0, 2), sample(0.0, 2)]
    samples[0].drafts = Drafts(count=2, num_tokens=10, num_accepted=3)
    samples[1].drafts = Drafts(1, 2, 0)
    metrics = Metrics()
    measure_turns_and_drafts(1, samples, 0, metrics)
    found = reduced(metrics)
    assert (
        found["rollout/draft_acceptance"] == pytest.approx(3 / 12)
        and found["rollout/draft_accepted_length"] == 1.0
    )


def test_a_rank_without_samples_adds_nothing():
    metrics = Metrics()
    measure_samples([], 3, metrics)
    measure_turns_and_drafts(1, [], 0, metrics)
    assert reduced(metrics) == {"rollout/tokens": 0.0}


def test_groups():
    # none of 2; 1 of 5; 1 of 2; 2 of 3; 4 of 5; all of 2; 0.4 and 0.5 are not right, but they
    # differ
    groups = {
        0: [0, 0],
        1: [1, 0, 0, 0, 0],
        2: [0, 1],
        3: [1, 0, 1],
        4: [1, 1, 1, 1, 0],
        5: [1, 1],
        6: [0.4, 0.5],
    }
    flat = [(float(reward), group) for group, rewards in groups.items() for reward in rewards][::-1]
    metrics = Metrics()
    measure_groups(
        torch.tensor([r for r, _ in flat], dtype=torch.float64),
        torch.tensor([g for _, g in flat]),
        metrics,
    )
    found = reduced(metrics)
    assert [round(7 * found[f"rollout/groups_solved_{name}"]) for name in SOLVED] == [
        2,
        1,
        1,
        1,
        1,
        1,
    ]
    assert found["rollout/groups_without_signal"] == pytest.approx(2 / 7)


def test_advantages_of_learned_tokens():
    experience = Experience(
        lengths=torch.tensor([3, 2]),
        input_ids=torch.zeros(5, dtype=torch.int64),
        rows=torch.arange(2),
        loss_mask=torch.tensor([False, True, True, False, False]),
        advantages=torch.tensor([9.0, 1.0, -3.0, 9.0, 9.0]),
    )
    metrics = Metrics()
    measure_experience(experience, metrics)
    assert reduced(metrics) == {
        "rollout/advantage": -1.0,
        "rollout/advantage_std": 2.0,
        "rollout/advantage_min": -3.0,
        "rollout/advantage_max": 1.0,
        "rollout/advantage_abs": 2.0,
        "rollout/left_out": 0.5,
    }
