"""`lightrft forecast`, on the learning curves of this project's own runs."""

import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from lightrft.extras.commands.debug.forecast import main
from lightrft.extras.tools.forecast import Forecast

CURVES = json.loads((Path(__file__).parent / "learning_curves.json").read_text())
"""Rewards by step of the quick start, of the real model, and of small models in tests."""


@pytest.mark.parametrize("seen", [0.4, 0.5, 0.7])
def test_intervals_hold_the_end_of_own_runs(seen: float) -> None:
    """The end is the mean of the last tenth of the steps."""
    assert len(CURVES) >= 40
    held = []
    for rewards in CURVES:
        forecast = Forecast(rewards[: max(12, int(seen * len(rewards)))], most=1.0)
        last = max(3, len(rewards) // 10)
        interval = forecast.at(len(rewards) - last // 2)
        held.append(interval.low <= fmean(rewards[-last:]) <= interval.high)
    assert 0.88 <= fmean(held) <= 0.97


def test_a_curve_without_noise_is_continued() -> None:
    steps = np.arange(60)
    rewards = 0.2 + 0.6 * (1 - np.exp(-steps / 30))
    interval = Forecast(rewards[:30]).at(60)
    assert interval.middle == pytest.approx(0.2 + 0.6 * (1 - np.exp(-2)), abs=0.01)
    assert interval.high - interval.low < 0.05


def test_a_target_is_reached_when_the_curve_reaches_it() -> None:
    steps = np.arange(200)
    noise = np.random.default_rng(0).normal(0, 0.01, 200)
    rewards = 0.2 + 0.6 * (1 - np.exp(-steps / 60)) + noise
    forecast = Forecast(rewards[:80], most=1.0)
    probability, when = forecast.reaches(0.7, 200)
    right = -60 * np.log(1 - 0.5 / 0.6)
    assert probability > 0.9 and when.low <= right <= when.high
    assert forecast.reaches(0.95, 100)[0] < 0.05


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"step": step + 1, "rollout/reward": reward, "rollout/reward_max": 1.0, "time/step": 36.0}
        for step, reward in enumerate(CURVES[-1])
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.json").write_text('{"world_size": 2}')
    main([str(tmp_path), "--target=0.01", f"--steps={len(rows) + 20}", "--price=2"])
    said = capsys.readouterr().out
    assert f"rollout/reward after step {len(rows) + 20}:" in said
    assert "0.01 is reached" in said and "hours" in said and "at 2 an hour and device" in said

    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:9]))
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "a forecast needs 12 steps, and there are 9" in capsys.readouterr().err
