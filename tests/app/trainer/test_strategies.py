"""Whole runs under DeepSpeed: they learn what FSDP2 runs learn, with every engine, and a killed one
continues.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.trainer.in_turn import train_in_turn
from runs import PPO, prepare, repeatable, train
from strategy.zero import DeepSpeedStrategy


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    """Without a strategy: what no flag names is DeepSpeed."""
    assert DeepSpeedStrategy
    return [flag for flag in prepare(tmp_path_factory.mktemp("inputs")) if flag != "--fsdp"]


FLAGS = [
    "--train_batch_size=16",
    "--use_kl_loss",
    "--init_kl_coef=0.1",
    "--max_tokens_per_microbatch=40",
    "--max_steps=2",
]


def assert_same_numbers(found: list[dict], expected: list[dict]) -> None:
    """Sampling may turn on a rounding sometime, so only the first steps are compared."""
    for mine, other in zip(repeatable(found), repeatable(expected), strict=True):
        assert mine.pop("engine/logprob_mismatch_max") < 1e-4
        assert mine == pytest.approx({name: other[name] for name in mine}, rel=2e-3, abs=1e-5)


@pytest.mark.slow
def test_zero_learns_what_fsdp_learns(inputs, tmp_path):
    """A rollout has several updates, micro-batches and a reference model.

    The engine gets new weights at each step.
    """
    flags = [*inputs, *PPO, *FLAGS, "--enable_engine_sleep"]
    strategies = "--fsdp", "--zero_stage=2", "--zero_stage=3"
    runs = [([*flags, strategy], tmp_path / strategy) for strategy in strategies]
    fsdp, *others = train_in_turn("train_ppo", 2, runs)
    for rows in others:
        assert len(rows) == 2
        assert_same_numbers(rows, fsdp)


@pytest.mark.slow
def test_vllm_beside_zero_3(inputs, tmp_path):
    """And what a phase does not need waits in host memory."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    flags = [
        *FLAGS,
        "--zero_stage=3",
        "--engine_type=vllm",
        "--enable_engine_sleep",
        "--offload_idle",
    ]
    rows = train("train_ppo", 2, [*inputs, *PPO, *flags], tmp_path)
    assert len(rows) == 2 and rows[-1]["train/ratio"] != 1
    assert all(
        row["engine/logprob_mismatch_max"] < 1e-4 and row["train/grad_norm"] > 0 for row in rows
    )


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    models = [
        dict(AutoModelForCausalLM.from_pretrained(run / name).named_parameters())
        for name in ("model", "model_ema")
    ]
    return {
        f"{index}.{name}": tensor.detach()
        for index, model in enumerate(models)
        for name, tensor in model.items()
    }


@pytest.mark.slow
def test_an_average_of_the_actor(inputs, tmp_path):
    """The average is saved beside the actor, and in checkpoints.

    A run of three steps and a run of two that continues have the same average.
    """
    flags = [*inputs, *PPO, "--save_steps=2", "--enable_ema", "--ema_beta=0.9"]
    lengths = {
        "whole": ["--max_steps=3"],
        "begun": ["--max_steps=2"],
        "continued": ["--max_steps=3", "--load_checkpoint"],
    }
    strategies = "--fsdp", "--zero_stage=3"
    checkpoints = {each: f"--ckpt_path={tmp_path / each / 'checkpoints'}" for each in strategies}
    runs = [
        (
            [*flags, strategy, *length, *([] if name == "whole" else [checkpoints[strategy]])],
            tmp_path / strategy / name,
        )
        for strategy in strategies
        for name, length in lengths.items()
    ]
    train_in_turn("train_ppo", 2, runs)

    start = AutoModelForCausalLM.from_pretrained(
        inputs[0].partition("=")[2]
    ).lm_head.weight.detach()
    for strategy in strategies:
        whole, begun, continued = (weights_of(tmp_path / strategy / name) for name in lengths)
        assert all(torch.equal(continued[name], whole[name]) for name in whole)
        of_average, of_actor = (begun[f"{index}.lm_head.weight"] - start for index in (1, 0))
        moved = of_average.norm() / of_actor.norm()
        assert 0.1 < moved < 0.2, "two steps, of a tenth of the way each"
