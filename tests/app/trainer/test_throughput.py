"""Tokens per second and operations of training do not depend on how many steps a row of metrics
has.
"""

import json

import pytest

from runs import PPO, prepare, train


def test_rows_of_several_steps_and_several_epochs(tmp_path):
    """Nothing changes at a learning rate of 0, so both runs have the same samples."""
    flags = [
        *prepare(tmp_path),
        *PPO,
        "--max_steps=4",
        "--actor_learning_rate=0",
        "--train_batch_size=16",
    ]
    held_out = [f"--eval_data={tmp_path / 'train.jsonl'}", "--eval_steps=2"]
    single = train("train_ppo", 1, flags, tmp_path / "single")
    options = ["--logging_steps=2", "--max_epochs=2", *held_out]
    joined = train("train_ppo", 1, [*flags, *options], tmp_path / "joined")
    assert [row["perf/steps"] for row in (*single, *joined)] == [1, 1, 1, 1, 2, 2]

    for row in (*single, *joined):
        tokens = row["rollout/tokens"] / row["perf/steps"]
        assert row["perf/tokens_per_second"] == pytest.approx(tokens / row["time/step"])
        phases = [name for name in row if name.startswith("time/") and name.count("/") == 1]
        seconds = sum(row[name] for name in phases if name not in ("time/step", "time/idle_share"))
        assert seconds <= row["time/step"]

    for row, pair in zip(joined, (single[:2], single[2:]), strict=True):
        assert row["rollout/tokens"] == sum(each["rollout/tokens"] for each in pair)
        assert row["perf/train_flops"] == pytest.approx(
            2 * sum(each["perf/train_flops"] for each in pair), rel=0.02
        )

    assert json.loads((tmp_path / "joined" / "run.json").read_text())["rollout_ranks"] == 0
