"""Why: advice that follows from the wrong number sends its reader to the wrong flag."""

import pytest

from lightrft.observe.scoreboard import ADVICE, NESTED, scoreboard


def row(step: float, generate: float, train: float, **others: float) -> dict:
    return {"time/step": step, "time/generate": generate, "time/train": train, "rollout/tokens": 1000, "time/idle_share": 0.25,
            "memory/peak_gb": 3.0, "engine/logprob_mismatch": 1e-6} | others  # fmt: skip


def test_numbers_by_hand():
    """The first step, which is slower, does not count; of two devices each has half of the tokens."""
    rows = [row(90, 80, 1), row(4, 1, 2), row(4, 1, 2), row(8, 2, 4, **{"memory/peak_gb": 5.0})]
    counts = {"parameters": 9e12, "active_parameters": 1e12, "weight_bytes": 2e12}
    found = scoreboard(rows, {"world_size": 2, "device": "NVIDIA H100 80GB HBM3"} | counts)
    assert (found.steps, found.seconds, found.tokens_per_second, found.peak_gb) == (3, 4, 125, 5.0)
    assert found.shares == {"generate": 4 / 16, "train": 8 / 16} and found.bottleneck == "train"
    assert found.mfu == pytest.approx(6 * 1e12 * 1000 / (2 * 2 * 989e12)) and found.sync_bytes == 2e12
    assert scoreboard(rows, {}).mfu is None and scoreboard([{"eval/loss": 1.0}], {}) is None


@pytest.mark.parametrize("part", NESTED)
def test_parts_of_generation_have_advice_of_their_own(part):
    assert scoreboard([row(4, 3, 1, **{part: 2.0})], {}).advice == ADVICE[NESTED[part]]
    assert scoreboard([row(4, 3, 1, **{part: 1.0})], {}).advice == ADVICE["generate"]
