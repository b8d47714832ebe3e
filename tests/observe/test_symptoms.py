"""`lightrft diagnose` on the metrics of real runs; scripts/bench/symptoms.py made the sick ones."""

import json
from pathlib import Path

import pytest

from lightrft.observe.symptoms import CHECKS, find_symptoms

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
    assert sum(not name.startswith(HEALTHY) for name in HISTORIES) == len(CHECKS) == 10
    assert sum(name.startswith(HEALTHY) for name in HISTORIES) >= 20


def test_a_short_run_has_no_symptom() -> None:
    history = {
        metric: [*enumerate(values[:9], 1)] for metric, values in HISTORIES["dead groups"].items()
    }
    assert find_symptoms(history) == []
