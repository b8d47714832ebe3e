"""Why: advice that follows from the wrong number sends readers to the wrong flag."""

import pytest

from lightrft.app.observe.scoreboard import NESTED, PHASE_ADVICE, scoreboard
from lightrft.models.parallel.peaks import known_device


def row(step: float, generate: float, train: float, **others: float) -> dict:
    return {
        "time/step": step,
        "time/generate": generate,
        "time/train": train,
        "rollout/tokens": 1000,
        "time/idle_share": 0.25,
        "memory/peak_gb": 3.0,
        "engine/logprob_mismatch": 1e-6,
    } | others


def test_numbers_by_hand():
    """The first step is slower and does not count; each of two devices has half of the tokens."""
    flops = {"perf/train_flops": 7e15}
    rows = [
        row(90, 80, 1),
        row(4, 1, 2, **flops),
        row(4, 1, 2, **flops),
        row(8, 2, 4, **flops, **{"memory/peak_gb": 5.0}),
    ]
    counts = {"parameters": 9e12, "active_parameters": 1e12, "weight_bytes": 2e12}
    found = scoreboard(rows, {"world_size": 2, "device": "NVIDIA H100 80GB HBM3"} | counts)
    assert (found.steps, found.seconds, found.tokens_per_second, found.peak_gb) == (3, 4, 125, 5.0)
    assert found.shares == {"generate": 4 / 16, "train": 8 / 16} and found.bottleneck == "train"
    assert found.mfu == pytest.approx(7e15 / (2 * 2 * 989e12)) and found.sync_bytes == 2e12
    assert scoreboard(rows, {}).mfu is None and scoreboard([{"eval/loss": 1.0}], {}) is None


def test_rows_of_several_steps_have_the_same_numbers():
    """With --logging_steps a row covers several steps.

    It has sums of their tokens and operations, but means of the seconds.
    """
    run = {"world_size": 2, "device": "NVIDIA H100 80GB HBM3"}
    names = ("rollout/tokens", "perf/train_flops")
    single = [row(4, 1, 2, **{"perf/train_flops": 7e15, "perf/steps": 1.0})] * 9
    joined = [
        each | {name: 3 * each[name] for name in (*names, "perf/steps")} for each in single[:3]
    ]
    one = scoreboard(single, run)
    three = scoreboard(joined, run)
    assert (one.tokens_per_second, one.mfu, one.seconds) == (
        three.tokens_per_second,
        three.mfu,
        three.seconds,
    )
    assert (one.steps, three.steps) == (8, 6)


def test_ranks_that_only_generate_are_devices_but_do_not_train():
    rows = [row(4, 1, 2, **{"perf/train_flops": 7e15})] * 2
    alone = {"world_size": 2, "device": "NVIDIA H100 80GB HBM3"}
    with_others = alone | {"rollout_ranks": 2}
    assert scoreboard(rows, alone).mfu == scoreboard(rows, with_others).mfu
    assert (
        scoreboard(rows, alone).tokens_per_second
        == 2 * scoreboard(rows, with_others).tokens_per_second
    )


@pytest.mark.parametrize("phase", NESTED)
def test_nested_phases_of_generation_have_their_advice(phase):
    assert scoreboard([row(4, 3, 1, **{phase: 2.0})], {}).advice == PHASE_ADVICE[NESTED[phase]]
    assert scoreboard([row(4, 3, 1, **{phase: 1.0})], {}).advice == PHASE_ADVICE["generate"]


def test_a_device_is_known_by_a_word_of_its_name():
    """An L40S is no L4, and has other peaks."""
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA L40S", "")
    assert [known_device(name) for name in names] == ["h100", "a100", "l4", "", ""]


@pytest.mark.parametrize(
    ("device", "flag"), [("", "--engine_kv_cache_gb"), ("NVIDIA H200", "--engine_mem_util")]
)
def test_advice_about_the_cache_is_for_the_device(device, flag):
    rows = [row(4, 3, 1)] * 2
    advice = scoreboard(rows, {"world_size": 1, "device": device}).advice
    assert [name for name in ("--engine_kv_cache_gb", "--engine_mem_util") if name in advice] == [
        flag
    ]
