"""Whole runs in which the trainer uses the experts that the engine chose (--router_replay)."""

from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file

from app.trainer.test_environments import ENDS, GAME
from app.trainer.test_resume import DEADLY_REWARD, assert_same_run, interrupted
from app.trainer.test_rollout_ranks import as_launched
from engine.runner_v2 import recorded_experts
from hosts import where_triton_interprets
from models.parallel.families import family_model
from ranks import run_cases, run_ranks
from runs import PPO, prepare, rows_of, run_here, train
from scripts.bench.router_replay import close_calls
from strategy.zero import DeepSpeedStrategy
from tiny import tiny_experts

pytestmark = pytest.mark.slow

REPLAY = [*PPO, "--router_replay", "--reward_workers=0", "--actor_learning_rate=1e-3"]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
LAYOUTS = {
    "divided experts": ["--ep_size=2", "--gradient_checkpointing"],
    "kept products": [
        "--ep_size=2",
        "--gradient_checkpointing",
        "--gradient_checkpointing_policy=selective",
    ],
    "ulysses": ["--sp_size=2"],
    "zigzag": ["--cp_size=2", "--gradient_checkpointing"],
    "tensor parallel": ["--tp_size=2"],
    "zero3": ["--fsdp=false", "--zero_stage=3"],
    "adapters and a reference": [
        *("--lora_rank=4", "--target_modules", "q_proj", "v_proj"),
        *("--init_kl_coef=0.1", "--use_kl_loss"),
    ],
    "a balance loss": ["--aux_loss_coef=0.1"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder)
    tiny_experts(folder / "experts", num_experts=8)
    family_model(folder / "biased", "glm4_moe", vocabulary=384)
    (folder / "game.py").write_text(GAME)
    (folder / "deadly.py").write_text(DEADLY_REWARD)
    return folder


def inputs(folder: Path, model: str = "experts", reward: str = "reward.py:share_of_ascii") -> list:
    return [
        "--fsdp",
        f"--pretrain={folder / model}",
        f"--prompt_data={folder / 'train.jsonl'}",
        f"--reward={folder}/{reward}",
        "--prompt_max_len=8",
        "--report_to=jsonl",
    ]


def test_records_belong_to_their_tokens_in_every_layout(folder: Path, tmp_path: Path) -> None:
    """Without rounding, a record of another token would differ from the router's own choice."""
    assert DeepSpeedStrategy
    game = ["--reward=environment", f"--environment={folder}/game.py:Letters", *ENDS]
    sizes = ["--generate_max_len=40", "--prompt_max_len=32"]
    cases = {**LAYOUTS, "episodes": [*game, *sizes]}
    flags = [*inputs(folder), *REPLAY, "--max_steps=2"]
    run_cases(
        2,
        run_here,
        {
            name: ("train_ppo", [*flags, *added, f"--save_path={tmp_path / name}"])
            for name, added in cases.items()
        },
    )

    for name in cases:
        for row in rows_of(tmp_path / name):
            assert row["train/replay_changed"] < 1e-3, name
            assert row["engine/logprob_mismatch_max"] < 2e-3, name
            assert 1 <= row["train/expert_load"] <= row["train/expert_load_max"] <= 8, name
            assert row["experts/load_of_layer_1"] >= 1, name


def test_records_come_from_ranks_that_only_generate(folder: Path, tmp_path: Path) -> None:
    """While a step of earlier weights is learned, some routers have moved on."""
    ahead = ["--rollout_ranks=1", "--max_staleness=1", "--rollout_correction=tis"]
    flags = [*inputs(folder), *REPLAY, *ahead, "--max_steps=3"]
    run_ranks(2, as_launched, {"ahead": flags}, str(tmp_path))
    rows = rows_of(tmp_path / "ahead")
    first, *later = (row["train/replay_changed"] for row in rows)
    assert first < 1e-3 and max(later) < 0.3


def test_biases_move_alike_in_every_layout(folder: Path, tmp_path: Path) -> None:
    layouts = {
        "data": [],
        "experts": ["--ep_size=2", "--gradient_checkpointing"],
        "sequences": ["--cp_size=2"],
        "zero3": ["--fsdp=false", "--zero_stage=3"],
    }
    flags = [*inputs(folder, "biased"), *REPLAY, "--router_bias_rate=0.01", "--max_steps=2"]
    cases = {
        name: ("train_ppo", [*flags, *added, f"--save_path={tmp_path / name}"])
        for name, added in layouts.items()
    }
    run_cases(2, run_here, cases)
    first, *others = (
        load_file(tmp_path / name / "model" / "model.safetensors")[BIAS] for name in layouts
    )
    assert first.abs().max() > 0.005
    for bias in others:
        torch.testing.assert_close(bias, first)
    for name in layouts:
        assert max(row["train/replay_changed"] for row in rows_of(tmp_path / name)) < 1e-3, (
            "the engine has the biases"
        )


@pytest.mark.parametrize("layout", [["--ep_size=2"], ["--fsdp=false", "--zero_stage=3"]])
def test_biases_are_part_of_averages_and_of_a_reference_that_moves(
    folder: Path, tmp_path: Path, layout: list[str]
) -> None:
    rate = 0.3  # so large that other biases choose other experts
    flags = [*inputs(folder, "biased"), *REPLAY, *layout, f"--router_bias_rate={rate}"]
    flags += ["--enable_ema", "--ema_beta=0.5", "--measure_kl", "--ref_refresh_steps=1"]
    rows = train("train_ppo", 2, [*flags, "--max_steps=2"], tmp_path)
    assert all(row["train/kl_k3"] < 1e-6 for row in rows), "it is the actor before the step"

    last, average = (
        load_file(tmp_path / name / "model.safetensors")[BIAS] for name in ("model", "model_ema")
    )
    first = (average - 0.5 * last) / 0.25
    steps = torch.stack([first, last - first]) / rate
    torch.testing.assert_close(steps, steps.sign(), rtol=0, atol=1e-5)
    assert steps[0].abs().sum() > 0


def test_the_mismatch_of_bfloat16_falls_tenfold(folder: Path, tmp_path: Path) -> None:
    close_calls(tmp_path / "model", experts=64)
    model = f"--pretrain={tmp_path / 'model'}"
    flags = [*inputs(folder), *PPO, model, "--bf16", "--actor_learning_rate=1e-4"]
    added = {"free": [], "replayed": ["--router_replay"]}
    cases = {
        name: (
            "train_ppo",
            [*flags, *flags_of_case, "--max_steps=5", f"--save_path={tmp_path / name}"],
        )
        for name, flags_of_case in added.items()
    }
    run_cases(1, run_here, cases)

    free, replayed = (
        fmean(row["engine/logprob_mismatch"] for row in rows_of(tmp_path / name)) for name in added
    )
    assert free > 10 * replayed
    changed = [row["train/replay_changed"] for row in rows_of(tmp_path / "replayed")]
    assert len(changed) == 5 and min(changed) > 0.1, "the routers would have chosen otherwise"


def test_a_killed_run_continues_with_biases_and_unfinished_groups(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [
        *inputs(folder, "biased", "deadly.py:deadly"),
        *REPLAY,
        *("--ep_size=2", "--router_bias_rate=0.01", "--dynamic_sampling", "--partial_rollout"),
        *("--over_sampling=1.5", "--rollout_correction=tis"),
        *("--max_steps=4", "--save_steps=2", "--no_async_save"),
    ]
    train("train_ppo", 2, flags, tmp_path / "whole")
    killed = tmp_path / "killed"
    assert interrupted(flags, killed, monkeypatch, KILL_AT="3") == ["latest", "step2"]
    train("train_ppo", 2, [*flags, "--load_checkpoint"], killed)
    assert_same_run(killed, tmp_path / "whole")

    before = load_file(folder / "biased" / "model.safetensors")
    after = load_file(killed / "model" / "model.safetensors")
    assert (after[BIAS] - before[BIAS]).abs().max() > 0.005


def test_vllm_returns_what_its_routers_chose(tmp_path: Path) -> None:
    """Its runner V2 is interpreted on a CPU; samples find prompts in the cache, and are cut.

    Each rank of an engine has a scheduler of its own, and gets the experts.
    """
    model = tiny_experts(tmp_path / "model", num_experts=8)
    ranks = partial(run_ranks, 2, recorded_experts, model, timeout=500)
    for found in where_triton_interprets(ranks):
        assert found["cached"] > 0 and found["samples"] == 5
        assert found["equal"] == found["records"] > 200
