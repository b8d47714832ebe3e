"""The recipes of docs/environments.md, shortened: each is learned with three seeds."""

import pytest

from runs import train
from scripts.prepare_quickstart import (
    CALL,
    CALL_END,
    demonstrations,
    guessing_problems,
    product_problems,
    tiny_qwen3,
    write_jsonl,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_game_is_learned(tmp_path, seed):
    """Only the answers of earlier turns tell which digit it is. 120 steps reach 0.69 of at most 0.72 (docs/environments.md)."""
    model = tiny_qwen3(tmp_path / "model", seed)
    write_jsonl(tmp_path / "train.jsonl", guessing_problems(seed)[0][:512])
    flags = ["--config=configs/guess_number.yaml", f"--pretrain={model}", f"--prompt_data={tmp_path}/train.jsonl",
             "--engine_type=hf", "--max_steps=20", "--num_episodes=2", f"--seed={seed}"]  # fmt: skip
    rows = train("train_ppo", 2, flags, tmp_path / "run")
    assert rows[0]["rollout/reward"] < 0.12 and sum(row["rollout/reward"] for row in rows[-3:]) / 3 > 0.25
    assert rows[-1]["episodes/turns"] < rows[0]["episodes/turns"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_tool_is_learned(tmp_path, seed):
    """No product is known without the calculator, and a quarter of the demonstrations call it well."""
    model, problems = tiny_qwen3(tmp_path / "model", seed, [CALL, CALL_END]), product_problems(seed)[0]
    write_jsonl(tmp_path / "train.jsonl", problems[:512])
    write_jsonl(tmp_path / "demonstrations.jsonl", demonstrations(problems, seed))
    flags = ["--config=configs/calculator_sft.yaml", f"--pretrain={model}", f"--prompt_data={tmp_path}/demonstrations.jsonl",
             f"--seed={seed}"]  # fmt: skip
    train("train_sft", 2, flags, tmp_path / "sft")
    flags = ["--config=configs/calculator.yaml", f"--pretrain={tmp_path}/sft/model", f"--prompt_data={tmp_path}/train.jsonl",
             "--eval_data=", "--eval_steps=-1", "--engine_type=hf", "--max_steps=12", f"--seed={seed}"]  # fmt: skip
    rows = train("train_ppo", 2, flags, tmp_path / "run")
    assert rows[0]["rollout/reward"] < 0.3 and sum(row["rollout/reward"] for row in rows[-3:]) / 3 > 0.6
    assert rows[-1]["episodes/tool_calls"] > 0.85 > rows[0]["episodes/tool_calls"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_agent_learns_a_game(tmp_path, seed):
    """The same game by a client of the OpenAI API."""
    model = tiny_qwen3(tmp_path / "model", seed)
    write_jsonl(tmp_path / "train.jsonl", guessing_problems(seed)[0][:512])
    flags = ["--config=configs/guess_number.yaml", f"--pretrain={model}", f"--prompt_data={tmp_path}/train.jsonl",
             "--environment=", "--agent=scripts/agents/guess_number.py:play",
             "--engine_type=hf", "--rollout_batch_size=8", "--train_batch_size=128", "--environment_workers=16",
             "--max_steps=16", f"--seed={seed}"]  # fmt: skip
    rows = train("train_ppo", 2, flags, tmp_path / "run")
    assert rows[0]["rollout/reward"] < 0.08 and sum(row["rollout/reward"] for row in rows[-3:]) / 3 > 0.18


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_task_of_reasoning_gym_is_learned(tmp_path, seed):
    """Episodes have up to five attempts. 60 steps reach 0.58 (docs/environments.md)."""
    model = tiny_qwen3(tmp_path / "model", seed)
    flags = ["--config=configs/reasoning_gym.yaml", f"--pretrain={model}", "--engine_type=hf", "--rollout_batch_size=16",
             "--train_batch_size=256", "--environment_workers=16", "--max_steps=14", f"--seed={seed}"]  # fmt: skip
    rows = train("train_ppo", 2, flags, tmp_path / "run")
    assert rows[0]["rollout/reward"] < 0.03 and sum(row["rollout/reward"] for row in rows[-3:]) / 3 > 0.25
    assert rows[-1]["episodes/turns"] < 4 < rows[0]["episodes/turns"]
