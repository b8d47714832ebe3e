"""Whole runs of GRPO: the reward rises, engine and trainer agree, every engine and number of ranks
starts and steps.
"""

import json
import math

import pytest

from app.trainer.in_turn import train_in_turn
from runs import PPO, prepare, repeatable, train


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("inputs"))


@pytest.mark.slow
def test_reward_rises_in_twelve_steps(inputs, tmp_path):
    rows = train(
        "train_ppo",
        2,
        [*inputs, *PPO, "--actor_learning_rate=1.5e-2", "--max_steps=12", "--seed=7"],
        tmp_path,
    )
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["rollout/reward"] < 0.55
    assert sum(row["rollout/reward"] for row in rows[-5:]) / 5 > 0.85
    assert all(row["engine/logprob_mismatch_max"] < 1e-4 for row in rows)
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_several_updates_of_one_rollout(inputs, tmp_path):
    """Two passes over two minibatches, with few tokens in each micro-batch.

    The loss includes the divergence from the reference.
    """
    flags = [
        "--train_batch_size=16",
        "--max_epochs=2",
        "--init_kl_coef=0.1",
        "--max_tokens_per_microbatch=40",
        "--max_steps=3",
    ]
    flags = [*inputs, *PPO, *flags]
    apart = ["--max_tokens_per_logprob_microbatch=150", "--weight_sync_bucket_mb=0"]
    runs = [(flags, tmp_path / "one"), ([*flags, *apart], tmp_path / "apart")]
    rows, others = train_in_turn("train_ppo", 2, runs)
    for row, other in zip(repeatable(rows), repeatable(others), strict=True):
        mismatch = other.pop("engine/logprob_mismatch_max"), row.pop("engine/logprob_mismatch_max")
        assert max(mismatch) < 1e-4 and other == pytest.approx(row, rel=2e-3, abs=1e-5)

    assert rows[0]["train/kl"] > 0  # zero in the first update, not in the three after it
    assert rows[-1]["train/ratio"] != 1
    assert all(row["engine/logprob_mismatch_max"] < 1e-4 for row in rows)


@pytest.mark.parametrize(
    ("engine", "world_size"), [("hf", 1), pytest.param("vllm", 2, marks=pytest.mark.slow)]
)
def test_every_engine_starts_and_steps(inputs, tmp_path, engine, world_size):
    flags = [f"--engine_type={engine}", "--enable_engine_sleep", "--max_steps=3", "--trace_steps=2"]
    rows = train("train_ppo", world_size, [*inputs, *PPO, *flags], tmp_path)
    assert len(rows) == 3
    assert all(
        row["engine/logprob_mismatch_max"] < 1e-4 and row["train/grad_norm"] > 0 for row in rows
    )

    for row in rows:
        refit = [row[f"time/generate/{name}"] for name in ("wake", "weight_sync", "sleep")]
        assert min(refit) >= 0 and refit[1] > 0 and sum(refit) < row["time/generate"]
        assert 0 < row["time/idle_share"] < 1

    events = json.loads((tmp_path / "trace.json").read_text())
    trained = [
        (event["args"]["step"], event["pid"]) for event in events if event["name"] == "train"
    ]
    assert trained == [(step, rank) for step in (1, 2) for rank in range(world_size)]


@pytest.mark.slow
def test_ranks_that_divide_sequences_train_as_one(inputs, tmp_path):
    """Two engines draw the same samples whether their ranks share data or not.

    So what is learned from the samples is the same too.
    """
    flags = [
        "--max_steps=2",
        "--init_kl_coef=0.1",
        "--train_batch_size=16",
        "--policy_loss=gspo_token",
        "--advantages_norm",
        "--rollout_correction=tis",
        "--rollout_correction_level=sequence",
        "--rollout_mask=geometric",
        "--entropy_coef=0.01",
    ]
    layouts = [], *(["--sp_size=2", f"--sp_impl={impl}"] for impl in ("ulysses", "zigzag"))
    runs = [
        ([*inputs, *PPO, *flags, *layout], tmp_path / str(number))
        for number, layout in enumerate(layouts)
    ]
    plain, *others = train_in_turn("train_ppo", 2, runs)
    for divided in others:
        assert len(divided) == 2
        for mine, other in zip(repeatable(divided), repeatable(plain), strict=True):
            assert mine.pop("engine/logprob_mismatch_max") < 1e-4
            assert mine == pytest.approx({name: other[name] for name in mine}, rel=2e-3, abs=1e-5)


@pytest.mark.slow
def test_idle_models_in_host_memory_change_nothing(inputs, tmp_path):
    """A run has the same numbers with idle models on the device and in host memory.

    It has several updates, a reference model, an evaluation and a checkpoint.
    """
    flags = [
        "--train_batch_size=16",
        "--init_kl_coef=0.1",
        "--max_steps=3",
        "--enable_engine_sleep",
        "--save_steps=2",
        f"--eval_data={inputs[2].partition('=')[2]}",
        "--eval_split=train",
        "--eval_steps=1",
    ]
    flags = [*inputs, *PPO, *flags]
    runs = [(flags, tmp_path / "plain"), ([*flags, "--offload_idle"], tmp_path / "idle")]
    plain, idle = train_in_turn("train_ppo", 2, runs)
    assert len(idle) == 3 and "eval/reward" in idle[0]
    assert repeatable(idle) == repeatable(plain)
