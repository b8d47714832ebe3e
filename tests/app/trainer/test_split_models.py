"""Whole runs of GRPO with layers or sequences split over ranks, with engines that share the
training layout and engines that do not. test_critic.py has them with the hf engine.
"""

import pytest

from runs import PPO, prepare, train

TP = ["--tp_size=2"]
SP = ["--sp_size=2"]
CP = ["--cp_size=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "engine_tp_size", "layout"),
    [(4, 2, [*TP, *SP]), (2, 2, [*CP, "--offload_idle"])],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_two_steps(tmp_path, world_size, engine_tp_size, layout):
    flags = [*prepare(tmp_path), *PPO, *layout, "--init_kl_coef=0.1", "--max_steps=2"]
    flags += ["--engine_type=vllm", f"--engine_tp_size={engine_tp_size}", "--enable_engine_sleep"]
    rows = train("train_ppo", world_size, flags, tmp_path / "run", timeout=400)
    assert len(rows) == 2

    for row in rows:
        assert row["engine/logprob_mismatch_max"] < 1e-4
        assert row["train/ratio"] == 1 and row["train/grad_norm"] > 0
        assert 32 * 2 < row["rollout/tokens"] <= 32 * (8 + 6), "each of the 32 samples counts once"

    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
