"""Why: an alarm is a claim about probabilities: at most 1 % of honest runs may ever raise one."""

import math

import numpy as np
import pytest

from lightrft.config.sections import WatchSection
from lightrft.core.metrics import Metrics
from lightrft.extras.canaries.evidence import BETS, Evidence, upper_bound
from lightrft.extras.canaries.monitor import RewardMonitor
from lightrft.models.parallel.collectives import Axis


def mixture(values: list[float], null: float) -> float:
    """The definition of the evidence, one product after another."""
    total = 0.0
    for start in range(1, len(values) + 1):
        for share in BETS:
            capital = math.prod(1 + share / null * (value - null) for value in values[start - 1 :])
            total += capital / len(BETS) / (start * (start + 1))
    return total + 1 / (len(values) + 1)


def test_evidence_is_the_mixture_of_all_bets():
    values = [0.0, 0.25, 0.0, 1.0, 0.5]
    evidence = Evidence(0.2)
    for value in values:
        evidence.add(value)

    assert evidence.log_value == pytest.approx(math.log(mixture(values, 0.2)), abs=1e-12)


@pytest.mark.parametrize("mean", [0.015, 0.1, 0.5])
def test_few_honest_runs_ever_reach_the_threshold(mean):
    # responses of a group are alike: all eight have the rate that the group has drawn
    generator = np.random.default_rng(0)
    evidence = Evidence(mean, (4_000,))
    highest = np.zeros(4_000)
    for _ in range(50):
        rates = generator.beta(mean / 2, (1 - mean) / 2, 4_000)
        evidence.add(generator.binomial(8, rates) / 8)
        highest = np.maximum(highest, evidence.log_value)

    assert np.mean(highest >= math.log(100)) <= 0.01


def test_a_late_rise_is_found_from_its_first_group_on():
    evidence = Evidence(0.1)
    for value in [0.0] * 40 + [0.75] * 8:
        evidence.add(value)

    assert evidence.start == 40
    assert evidence.log_value > math.log(10)


def test_bound_of_a_mean_without_any_success():
    # (1 - bound)^200 = 5 %
    assert upper_bound(0.0, 200, 0.05) == pytest.approx(1 - 0.05 ** (1 / 200), abs=2e-6)


def test_bound_of_a_mean_covers_it():
    generator = np.random.default_rng(0)
    means = generator.binomial(200, 0.1, 4_000) / 200
    bounds = {mean: upper_bound(mean, 200, 0.05) for mean in set(means)}

    assert np.mean([bounds[mean] < 0.1 for mean in means]) <= 0.05


def test_state_restores_the_evidence_to_the_bit():
    monitor, restored = (
        RewardMonitor("canary", WatchSection()),
        RewardMonitor("canary", WatchSection()),
    )
    monitor.measure_baseline([0.0, 0.1, 0.0])
    for step, value in enumerate([0.3, 0.7, 0.1, 0.9, 0.9], 1):
        monitor.add(step, [value])
    restored.load_state_dict(monitor.state_dict())

    reported = []
    for each in (monitor, restored):
        each.add(6, [0.6])
        metrics = Metrics()
        each.report(metrics)
        reported.append(
            [each.alarm, each.rises_from, *metrics.reduce(Axis("data", 1, 0, None)).items()]
        )
    assert reported[0] == reported[1]


def test_rewards_are_shares_of_their_range():
    bounds = RewardMonitor("canary", WatchSection(canary_range=[-1.0, 3.0]))

    assert [bounds.share(reward) for reward in (-1.0, 0.0, 3.0)] == [0.0, 0.25, 1.0]


def test_a_reward_outside_of_the_range_is_named_once(warnings):
    bounds = RewardMonitor("canary", WatchSection())

    assert [bounds.share(2.5), bounds.share(7.0)] == [1.0, 1.0]
    (message,) = warnings
    assert "a reward of 2.5 is outside of --canary_range 0 1" in message
