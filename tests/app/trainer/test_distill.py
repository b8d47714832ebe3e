"""Whole runs of on-policy distillation: the student comes near its teacher.

The teacher is a role of the run, or a server behind HTTP.
"""

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from app.trainer.in_turn import train_in_turn
from lightrft.app.quickstart.inputs import tiny_qwen3
from runs import PPO, prepare, repeatable, train
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
def test_the_student_comes_near_the_teacher(inputs, teacher, tmp_path):
    """Under ZeRO, where two ranks gather the teacher; the tests below compare layouts of FSDP2."""
    strategy = ["--fsdp=false", "--zero_stage=3", "--offload_idle"]
    flags = [f"--teacher_pretrain={teacher}", "--max_steps=20", *strategy]
    rows = train("train_ppo", 2, [*inputs, *PPO, *DISTILL, *flags], tmp_path)
    divergence = [row["rollout/teacher_kl"] for row in rows]
    assert sum(divergence[-3:]) < 0.7 * sum(divergence[:3]), divergence
    assert all(math.isfinite(value) for row in rows for value in row.values())


@pytest.mark.slow
def test_a_teacher_behind_http_is_the_same(inputs, teacher, tmp_path):
    """Beside the reward of groups, with and without ranks that divide the requests."""
    flags = [
        *inputs,
        *PPO,
        "--reward=exact_match",
        "--train_batch_size=16",
        "--distill_coef=0.3",
        "--max_steps=2",
    ]
    with teacher_server(str(teacher)) as url:
        teachers = f"--teacher_pretrain={teacher}", f"--teacher_url={url}"
        runs = [
            ([*flags, *layout, of], tmp_path / f"{len(layout)}{place}")
            for layout in ([], ["--sp_size=2"])
            for place, of in enumerate(teachers)
        ]
        rows = train_in_turn("train_ppo", 2, runs)

    for near, far in (rows[:2], rows[2:]):
        for mine, expected in zip(repeatable(far), repeatable(near), strict=True):
            assert mine["rollout/teacher_kl"] > 0 and mine["train/grad_norm"] > 0
            assert mine.pop("engine/logprob_mismatch_max") < 1e-4
            assert mine == pytest.approx(
                {name: expected[name] for name in mine}, rel=2e-3, abs=1e-5
            )


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """Prompts with the label of a teacher, and with a prompt that only a teacher sees."""
    path = tmp_path_factory.mktemp("tasks") / "train.jsonl"
    rows = [
        {
            "input": "abcdefgh"[: 2 + row % 5] + "=",
            "hint": f"{row}: " + "abcdefgh"[: 2 + row % 3] + "=",
            "teacher": "one" if row % 3 else "two",
        }
        for row in range(24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


DIVERGENCE = "train/teacher_divergence"


@pytest.mark.slow
def test_the_student_comes_near_the_teachers_distribution(inputs, teacher, tmp_path):
    """On samples, and on answers of the data."""
    flags = [f"--teacher_pretrain={teacher}", "--distill_top_k=1000", "--distill_beta=1"]
    data = next(flag for flag in inputs if "--prompt_data" in flag).removeprefix("--prompt_data=")
    flags += [f"--pretrain_data={data}", "--ptx_teacher", "--ptx_coef=0.5", "--distill_coef=0.5"]
    rows = train("train_ppo", 1, [*inputs, *PPO, *DISTILL, *flags, "--max_steps=12"], tmp_path)
    divergence = [row[DIVERGENCE] for row in rows]
    assert min(divergence) > 0
    assert sum(divergence[-3:]) < 0.8 * sum(divergence[:3]), divergence
    on_answers = [row["train/ptx_divergence"] for row in rows]
    assert sum(on_answers[-3:]) < 0.8 * sum(on_answers[:3]), on_answers
    # More than the vocabulary has is all of it.
    assert all(row["rollout/teacher_top_mass"] == pytest.approx(1, abs=1e-5) for row in rows)


@pytest.mark.slow
def test_two_teachers_say_the_same_to_every_layout(inputs, teacher, tasks, tmp_path):
    """Each scores the samples of its prompts, which it reads with a hint."""
    other = next(flag for flag in inputs if "--pretrain" in flag).removeprefix("--pretrain=")
    flags = [
        *[*inputs, *PPO, *DISTILL, "--max_steps=2", f"--prompt_data={tasks}"],
        *[f"--teacher_pretrain=one={teacher},two={other}", "--teacher_key=teacher"],
        *["--teacher_prompt_key=hint", "--distill_top_k=40"],
    ]
    layouts = [
        ["--tp_size=2", "--max_tokens_per_microbatch=40"],
        ["--sp_size=2"],
        ["--offload_idle", "--max_tokens_per_logprob_microbatch=30"],
    ]
    runs = [([*flags, *layout], tmp_path / str(number)) for number, layout in enumerate(layouts)]
    alone = train("train_ppo", 1, flags, tmp_path / "alone")

    for rows in train_in_turn("train_ppo", 2, runs):
        for mine, expected in zip(rows, alone, strict=True):
            for name in (DIVERGENCE, "rollout/teacher_top_mass", "train/loss", "train/grad_norm"):
                assert mine[name] == pytest.approx(expected[name], rel=2e-3), name
    assert 0.1 < alone[0]["rollout/teacher_top_mass"] < 0.99


@pytest.mark.slow
def test_a_model_learns_from_itself_with_a_hint(inputs, tasks, tmp_path):
    """It says without the hint what it says with it; its average learns more slowly."""
    shared = [*inputs, *PPO, *DISTILL, f"--prompt_data={tasks}", "--teacher_prompt_key=hint"]
    flags = [*shared, "--distill_top_k=64", "--self_teacher=actor", "--max_steps=12"]
    average = ["--self_teacher=average", "--enable_ema", "--ema_beta=0.9", "--max_steps=3"]
    runs = [(flags, tmp_path / "actor"), ([*flags, *average], tmp_path / "ema")]
    divergence, later = (
        [row[DIVERGENCE] for row in rows] for rows in train_in_turn("train_ppo", 1, runs)
    )
    assert sum(divergence[-3:]) < 0.7 * sum(divergence[:3]), divergence
    assert later[0] == pytest.approx(divergence[0], rel=1e-5)
    assert later[2] != pytest.approx(divergence[2], rel=1e-2)
