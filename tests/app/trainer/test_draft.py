"""Whole runs that train a draft model.

More of the drafts are accepted after training, and a run that ends can go on.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.trainer.in_turn import train_in_turn
from lightrft.app.cli.export import main as export
from lightrft.app.quickstart.inputs import tiny_qwen3
from runs import PPO, prepare
from with_vllm import load_vllm

TEMPERATURE = 0.3


@torch.no_grad()
def loss_of(folder: Path, dump: Path) -> float:
    """Return the mean negative log-prob of all dumped response tokens, computed by transformers.

    It is normalised over the tokenizer's tokens only.
    """
    num_tokens = len(AutoTokenizer.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = []
    for file in dump.iterdir():
        for row in map(json.loads, file.read_text().splitlines()[1:]):
            prompt = row["prompt"]["token_ids"]
            response = row["token_ids"]
            logits = (
                model(torch.tensor([prompt + response])).logits[
                    0, len(prompt) - 1 : -1, :num_tokens
                ]
                / TEMPERATURE
            )
            losses.append(
                torch.nn.functional.cross_entropy(logits, torch.tensor(response), reduction="none")
            )

    return float(torch.cat(losses).mean())


@pytest.mark.slow
def test_a_trained_draft_is_accepted_more_often_and_goes_on_after_a_checkpoint(
    tmp_path, monkeypatch
):
    """The run drafts as if drafts cost nothing.

    A replay in two parts, without an engine, has the same numbers.
    """
    load_vllm()
    from lightrft.engine.vllm.speculation import Costs, Speculation

    monkeypatch.setattr(Speculation, "_measure", lambda speculation: (Costs({1: -1.0}), Costs({})))
    draft = tiny_qwen3(tmp_path / "draft", seed=1)
    dump = tmp_path / "dump"
    flags = [
        *prepare(tmp_path),
        *PPO,
        f"--temperature={TEMPERATURE}",
        "--speculative=draft",
        f"--draft_pretrain={draft}",
        "--draft_learning_rate=1e-2",
        "--generate_max_len=24",
    ]

    engine = [
        "--engine_type=vllm",
        "--engine_kv_cache_gb=0.125",
        "--enable_engine_sleep",
        f"--dump_rollouts={dump}",
    ]
    parts = [*flags, "--engine_type=vllm", f"--replay_rollouts={dump}", "--save_steps=4"]
    runs = [
        ([*flags, *engine, "--max_steps=8"], tmp_path / "whole"),
        ([*parts, "--max_steps=4"], tmp_path / "parts"),
        ([*parts, "--max_steps=8", "--load_checkpoint"], tmp_path / "parts"),
    ]
    whole, _, resumed = train_in_turn("train_ppo", 2, runs)
    accepted = [row["rollout/draft_acceptance"] for row in whole]
    assert sum(accepted[-2:]) > 3 * sum(accepted[:2]) > 0, accepted
    assert whole[0]["draft/loss"] == pytest.approx(loss_of(draft, dump / "step_000001"), rel=1e-4)
    names = ("draft/loss", "draft/grad_norm", "draft/learning_rate", "train/loss")
    assert [[row[name] for name in names] for row in resumed] == [
        [row[name] for name in names] for row in whole
    ]
    export([str(tmp_path / "parts" / "checkpoints"), str(tmp_path / "exported"), "--name=draft"])

    folders = (
        draft,
        tmp_path / "exported",
        tmp_path / "parts" / "draft",
        tmp_path / "whole" / "draft",
    )
    first, *others = (load_file(folder / "model.safetensors") for folder in folders)

    for name, weight in first.items():
        exported, resumed_weight, expected = (weights[name] for weights in others)
        assert (
            torch.equal(exported, expected)
            and torch.equal(resumed_weight, expected)
            and not torch.equal(weight, expected)
        )
