"""Whole runs of adapters on a base in four bits: two ranks learn with vLLM, and a run goes on after
a rank was killed.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from app.trainer import sabotage
from lightrft.strategy.checkpoint.final_model import export_checkpoint
from ranks import exit_codes
from runs import PPO, prepare, repeatable, train

pytestmark = pytest.mark.slow
pytest.importorskip("bitsandbytes")

QLORA = [
    *("--load_in_4bit", "--lora_rank=8", "--lora_alpha=32", "--actor_learning_rate=1e-2"),
    *("--gradient_checkpointing", "--init_kl_coef=0.001", "--seed=7"),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("inputs"))


def test_vllm_follows_two_ranks_that_learn_with_adapters_on_bytes(inputs, tmp_path):
    """tests/strategy/test_four_bits.py compares what is learned with PEFT."""
    flags = ["--engine_type=vllm", "--enable_engine_sleep", "--max_steps=5"]
    rows = train("train_ppo", 2, [*inputs, *PPO, *QLORA, *flags], tmp_path)
    assert all(row["train/grad_norm"] > 0 for row in rows)
    assert all(row["engine/logprob_mismatch_max"] < 1e-4 for row in rows)
    # The reference is the same base in four bits, without adapters.
    assert rows[0]["train/kl"] == 0 < rows[-1]["train/kl"]


def spoiled(flags: list[str], folder: Path) -> None:
    log = open(folder / f"log{os.environ['RANK']}", "w", buffering=1)
    os.dup2(log.fileno(), 2)
    sys.stderr = log
    sabotage.main(flags)


def test_a_killed_run_goes_on_bit_by_bit(inputs, tmp_path, monkeypatch):
    """Four steps at once, and three until a rank is killed and the rest, have the same numbers.

    The exported checkpoint is the model of the run: the dequantized base with merged adapters.
    """
    flags = [*inputs, *PPO, *QLORA, "--save_steps=2", "--max_steps=4", "--enable_ema"]
    parts = [*flags, f"--save_path={tmp_path / 'parts'}"]
    whole = train("train_ppo", 2, flags, tmp_path / "whole")
    monkeypatch.setattr("lightrft.models.launch.heartbeat.GRACE", 0.4)
    monkeypatch.setenv("SABOTAGE", "train:1:kill:4")
    assert exit_codes(2, spoiled, parts, tmp_path)[1] == -9

    resumed = train("train_ppo", 2, [*flags, "--load_checkpoint"], tmp_path / "parts")
    assert repeatable(resumed)[-2:] == repeatable(whole)[-2:]
    exported = export_checkpoint(tmp_path / "parts", tmp_path / "exported")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    same = {
        whole / "model": (parts / "model", exported),
        whole / "model_ema": (parts / "model_ema",),
    }
    for folder, others in same.items():
        expected = load_file(folder / "model.safetensors")
        for other in others:
            found = load_file(other / "model.safetensors")
            assert all(torch.equal(expected[name], found[name]) for name in expected), other
