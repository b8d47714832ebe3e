"""`lightrft diagnose` on the metrics of real runs; scripts/bench/symptoms.py made the sick ones."""

import json
import re
from pathlib import Path

import pytest

from lightrft.app.observe.symptoms import CHECKS, find_symptoms
from lightrft.config import section_of_field

HISTORIES = json.loads((Path(__file__).parent / "histories.json").read_text())
HEALTHY = ("healthy", "laptop", "quickstart")
"""Beginnings of the names of runs that learn, by GRPO and its family, on several tasks."""


def found(name: str) -> list[str]:
    history = {metric: [*enumerate(values, 1)] for metric, values in HISTORIES[name].items()}
    return [symptom.name for symptom in find_symptoms(history)]


@pytest.mark.parametrize("name", [name for name in HISTORIES if not name.startswith(HEALTHY)])
def test_a_sick_run_is_named(name: str) -> None:
    assert name in found(name)


@pytest.mark.parametrize("name", [name for name in HISTORIES if name.startswith(HEALTHY)])
def test_a_healthy_run_has_no_symptom(name: str) -> None:
    assert found(name) == []


def test_each_check_has_a_sick_run() -> None:
    sick = sum(not name.startswith(HEALTHY) for name in HISTORIES)
    # A gamed reward is in tests/extras/canaries, a deep mismatch in tests/algorithms/test_depth.py.
    assert sick == len(CHECKS) - 1 == 10
    assert sum(name.startswith(HEALTHY) for name in HISTORIES) >= 20


def test_equal_rewards_are_no_symptom_where_they_are_the_best_ones() -> None:
    """A penalty that the policy has learned to avoid: 0 is the largest reward."""
    metrics = {
        "rollout/reward": [-1 + step / 20 for step in range(20)] + [0.0] * 20,
        "rollout/reward_min": [-2.0] * 20 + [0.0] * 20,
        "rollout/reward_max": [0.0] * 40,
        "rollout/groups_without_signal": [step / 20 for step in range(20)] + [1.0] * 20,
    }
    history = {name: [*enumerate(values, 1)] for name, values in metrics.items()}
    assert find_symptoms(history) == []
    history["rollout/reward"] = [(step, -1.0) for step in range(40)]
    assert [symptom.name for symptom in find_symptoms(history)] == ["dead groups"]


def test_a_component_of_the_reward_that_never_changes_is_not_dominated() -> None:
    metrics = {
        "rollout/reward": [1 + step / 40 for step in range(40)],
        "rollout/reward_of_right": [step / 40 for step in range(40)],
        "rollout/reward_of_format": [1.0] * 40,
    }
    history = {name: [*enumerate(values, 1)] for name, values in metrics.items()}
    assert find_symptoms(history) == []

    history["rollout/reward_of_format"] = [(step, 0.9 + step / 4000) for step in range(40)]
    (symptom,) = find_symptoms(history)
    assert symptom.name == "one component of the reward dominates"
    assert symptom.evidence.endswith("rollout/reward_of_right; rollout/reward_of_format is 0.909")


def test_a_short_run_has_no_symptom() -> None:
    history = {
        metric: [*enumerate(values[:9], 1)] for metric, values in HISTORIES["dead groups"].items()
    }
    assert find_symptoms(history) == []


def test_advice_names_flags_that_exist() -> None:
    advice = " ".join(
        symptom.advice
        for history in HISTORIES.values()
        for symptom in find_symptoms(
            {metric: [*enumerate(values, 1)] for metric, values in history.items()}
        )
    )
    flags = set(re.findall(r"--(\w+)", advice))
    assert len(flags) > 10 and flags <= set(section_of_field())
