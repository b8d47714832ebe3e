"""Why: a step's time must be accounted for, and an error must be able to name the phase it happened
in.
"""

import json

import pytest

from lightrft.app.observe.timeline import extend_timeline
from lightrft.core import metrics as module
from lightrft.core.metrics import Trace


class Clock:
    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def time(self):
        return self.now + 1e9


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def make(**options):
    return Trace(peak_memory=lambda: 3_000_000_000, memory_in_use=lambda: 500_000_000, **options)


def test_phases_add_up_and_the_step_starts_anew(clock):
    seen = []
    trace = make(on_phase=[seen.append])
    for _ in range(2):
        with trace.phase("generate"):
            clock.now += 2
            with trace.phase("weight_sync", idle=True):
                assert trace.current == "generate/weight_sync"
                clock.now += 1

    clock.now += 4
    assert trace.step() == {
        "time/generate/weight_sync": 2.0,
        "time/generate": 6.0,
        "time/step": 10.0,
        "time/idle_share": 0.2,
        "memory/peak_gb": 3.0,
        "memory/now_gb": 0.5,
    }
    assert seen == ["generate", "generate/weight_sync", "generate", ""] * 2
    clock.now += 1
    assert {name: value for name, value in trace.step().items() if name.startswith("time")} == {
        "time/step": 1.0,
        "time/idle_share": 0.0,
    }


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


def test_the_timeline_is_complete_after_every_step(clock, tmp_path):
    file = tmp_path / "trace.json"
    ranks = [make(), make()]
    for step in (1, 2):
        for rank, trace in enumerate(ranks):
            with trace.phase("generate"):
                clock.now += 2
                with trace.phase("wait", idle=True):
                    clock.now += rank
            trace.record("rewards", "reward of 4 responses", clock.now - 1.5)
        extend_timeline(file, step, [trace.take_spans() for trace in ranks])
        events = json.loads(file.read_text())

    phases = [event for event in events if event["ph"] == "X"]
    assert [
        (event["pid"], event["args"]["step"], event["name"], event["cat"], event["dur"])
        for event in phases
    ] == [
        (rank, step, *phase, seconds * 1e6)
        for step in (1, 2)
        for rank in (0, 1)
        for phase, seconds in ((("wait", "idle"), rank), (("generate", "phase"), 2 + rank))
    ]
    assert phases[0]["ts"] == (1e9 + 102) * 1e6 and phases[1]["ts"] == (1e9 + 100) * 1e6
    calls = [event for event in events if event["ph"] in "be"]
    begins = calls[::2]
    ends = calls[1::2]
    assert all(
        begin["id"] == end["id"] and end["ts"] - begin["ts"] == 1.5e6
        for begin, end in zip(begins, ends, strict=True)
    )
    assert len(begins) == 4 and {
        event["args"]["name"] for event in events if event["ph"] == "M"
    } == {"rank 0", "rank 1"}


@pytest.mark.parametrize("left", ["", "[", "[\n", "{}", '[\n{"ph": "M"', "\x00" * 50])
def test_a_timeline_that_was_cut_begins_anew(clock, tmp_path, left):
    file = tmp_path / "trace.json"
    file.write_text(left)
    trace = make()
    for step in (1, 2):
        with trace.phase("generate"):
            clock.now += 1.0
        extend_timeline(file, step, [trace.take_spans()])
    assert [each["ph"] for each in json.loads(file.read_text())] == ["M", "X", "M", "X"]
