"""Whole runs with --ep_size: GRPO with vLLM on two ranks, and a run that resumes in two layouts."""

import shutil
from pathlib import Path

import pytest
import torch

from app.trainer.in_turn import train_in_turn
from app.trainer.test_resume import DEADLY_REWARD, assert_same_run, parameters
from ranks import run_cases
from runs import PPO, prepare, rows_of, run_here, train
from tiny import tiny_experts

RUN = [
    *PPO,
    "--init_kl_coef=0.1",
    "--actor_learning_rate=1e-3",
    "--gradient_checkpointing",
    "--save_steps=2",
    "--no_async_save",
    "--reward_workers=0",
]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    experts = tiny_experts(folder / "experts", num_experts=4)
    (folder / "deadly.py").write_text(DEADLY_REWARD)
    reward = f"--reward={folder / 'deadly.py'}:deadly"
    return [*prepare(folder), *RUN, f"--pretrain={experts}", reward]


@pytest.mark.slow
def test_vllm_samples_what_divided_experts_learn_from(flags: list[str], tmp_path: Path) -> None:
    vllm = ["--engine_type=vllm", "--enable_engine_sleep", "--max_steps=2"]
    rows = train("train_ppo", 2, [*flags, *vllm, "--ep_size=2"], tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert row["engine/logprob_mismatch_max"] < 1e-4
        assert row["train/ratio"] == 1 and row["train/grad_norm"] > 0


@pytest.mark.slow
def test_a_run_continues_with_divided_and_with_whole_experts(
    flags: list[str], tmp_path: Path
) -> None:
    divided = [*flags, "--ep_size=2"]
    parts = tmp_path / "parts"
    runs = [([*divided, "--max_steps=4"], tmp_path / "whole"), ([*divided, "--max_steps=2"], parts)]
    train_in_turn("train_ppo", 2, runs)

    again = shutil.copytree(parts, tmp_path / "again")
    goes_on = ["--max_steps=4", "--load_checkpoint"]
    train_in_turn("train_ppo", 2, [([*divided, *goes_on], parts), ([*flags, *goes_on], again)])
    assert_same_run(parts, tmp_path / "whole")
    names = ["rollout/reward", "train/loss", "train/grad_norm"]
    found, expected = (
        torch.tensor([[row[name] for name in names] for row in rows_of(folder)])
        for folder in (again, tmp_path / "whole")
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    theirs = parameters(tmp_path / "whole")
    for name, tensor in parameters(again).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)


OPTIONS = {
    "adapters in bfloat16": ["--bf16", "--lora_rank=4", "--target_modules", "q_proj", "v_proj"],
    "a critic, balance, and once a step": [
        "--advantage_estimator=gae",
        "--critic_learning_rate=1e-3",
        "--aux_loss_coef=0.1",
        "--reduce_gradients_once",
        "--gather_parameters_once",
    ],
}


@pytest.mark.slow
def test_options_change_no_number(flags: list[str], tmp_path: Path) -> None:
    """What is learned with divided experts is the same as with whole ones, but for rounding."""
    folders = {(name, ep): tmp_path / f"{name}{ep}" for name in OPTIONS for ep in (1, 2)}
    first_steps = [*flags, "--max_steps=2"]
    cases = {
        case: (
            "train_ppo",
            [*first_steps, *OPTIONS[case[0]], f"--ep_size={case[1]}", f"--save_path={path}"],
        )
        for case, path in folders.items()
    }
    run_cases(2, run_here, cases)
    for name in OPTIONS:
        whole, divided = (rows_of(folders[name, ep])[-1] for ep in (1, 2))
        for metric in ("rollout/reward", "train/loss", "train/grad_norm"):
            assert divided[metric] == pytest.approx(whole[metric], rel=1e-5), (name, metric)
