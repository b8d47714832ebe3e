"""Why: a step's time must be accounted for, and an error must be able to name the phase it happened in."""

import pytest

from lightrft.observe import trace as module
from lightrft.observe.trace import Trace


class Clock:
    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def make(**options):
    return Trace(peak_memory=lambda: 3_000_000_000, memory_in_use=lambda: 500_000_000, **options)


def test_phases_add_up_and_the_step_starts_anew(clock):
    seen = []
    trace = make(on_phase=seen.append)
    for _ in range(2):
        with trace.phase("generate"):
            clock.now += 2
            with trace.phase("weight_sync"):
                assert trace.current == "generate/weight_sync"
                clock.now += 1
    clock.now += 4
    assert trace.step() == {
        "time/generate/weight_sync": 2.0, "time/generate": 6.0, "time/step": 10.0, "memory/peak_gb": 3.0, "memory/now_gb": 0.5,
    }  # fmt: skip
    assert seen == ["generate", "generate/weight_sync", "generate", ""] * 2
    clock.now += 1
    assert trace.step()["time/step"] == 1.0


def test_a_phase_is_charged_with_the_device_work_it_launched(clock):
    def wait():
        clock.now += 5

    trace = make(synchronize=wait)
    with trace.phase("train"):
        clock.now += 1
    assert trace.step()["time/train"] == 6.0


def test_the_innermost_failing_phase_is_remembered():
    trace = make()
    with pytest.raises(RuntimeError), trace.phase("train"), trace.phase("backward"):
        raise RuntimeError
    assert (trace.failed, trace.current) == ("train/backward", "")
