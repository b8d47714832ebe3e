"""Whole runs of on-policy distillation: the student comes near its teacher.

The teacher is a role of the run, or a server behind HTTP.
"""

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from runs import PPO, prepare, repeatable, train
from scripts.prepare_quickstart import tiny_qwen3
from strategy.zero import DeepSpeedStrategy
from teacher_server import teacher_server

DISTILL = ["--advantage_estimator=distill", "--reward=none", "--train_batch_size=16"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    assert DeepSpeedStrategy
    return [
        flag
        for flag in prepare(tmp_path_factory.mktemp("inputs"))
        if not flag.startswith("--reward")
    ]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """A model with other weights than the student, and surer of its tokens."""
    folder = tiny_qwen3(tmp_path_factory.mktemp("teacher"), seed=1)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(1, []), (2, ["--fsdp=false", "--zero_stage=3", "--offload_idle"])],
    ids=str,
)
def test_the_student_comes_near_the_teacher(inputs, teacher, tmp_path, ranks, strategy):
    flags = [f"--teacher_pretrain={teacher}", "--max_steps=20", *strategy]
    rows = train("train_ppo", ranks, [*inputs, *PPO, *DISTILL, *flags], tmp_path)
    divergence = [row["rollout/teacher_kl"] for row in rows]
    assert sum(divergence[-3:]) < 0.7 * sum(divergence[:3]), divergence
    assert all(math.isfinite(value) for row in rows for value in row.values())


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["--sp_size=2"]], ids=str)
def test_a_teacher_behind_http_is_the_same(inputs, teacher, tmp_path, layout):
    """Beside the reward of groups, with and without ranks that divide the requests."""
    flags = [
        *inputs,
        *PPO,
        "--reward=exact_match",
        "--train_batch_size=16",
        "--distill_coef=0.3",
        "--max_steps=2",
        *layout,
    ]
    near = train("train_ppo", 2, [*flags, f"--teacher_pretrain={teacher}"], tmp_path / "near")
    with teacher_server(str(teacher)) as url:
        far = train("train_ppo", 2, [*flags, f"--teacher_url={url}"], tmp_path / "far")

    for mine, expected in zip(repeatable(far), repeatable(near), strict=True):
        assert mine["rollout/teacher_kl"] > 0 and mine["train/grad_norm"] > 0
        assert mine.pop("engine/logprob_mismatch_max") < 1e-4
        assert mine == pytest.approx({name: expected[name] for name in mine}, rel=2e-3, abs=1e-5)
