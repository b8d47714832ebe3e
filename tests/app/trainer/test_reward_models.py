"""Whole runs against reward models: what they say is the reward, in training and in evaluation."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from algorithms.roles import rows
from app.trainer.in_turn import train_in_turn
from lightrft.app.cli import MAINS
from ranks import run_ranks
from runs import PPO, prepare, repeatable, train

NONE = [
    "--reward=none",
    "--advantage_estimator=ppo",
    "--critic_learning_rate=1e-3",
    "--max_steps=2",
    "--max_epochs=2",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[list[str], str]:
    folder = tmp_path_factory.mktemp("inputs")
    flags = [flag for flag in prepare(folder) if not flag.startswith("--reward")]
    scored = rows.dense_scorer(str(folder / "model"), 3)
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(scored)
    return flags, scored


@pytest.fixture(scope="module")
def two_ranks(inputs, tmp_path_factory) -> tuple[list[dict], Path]:
    flags, scored = inputs
    save_path = tmp_path_factory.mktemp("run")
    test = flags[2].replace("prompt_data", "eval_data")
    added = [
        f"--reward_pretrain={scored}",
        "--reward_model_coef=0.5",
        test,
        "--eval_steps=1",
        "--max_eval_samples=5",
        "--num_trajectories_to_save=8",
    ]

    return train("train_ppo", 2, [*flags, *PPO, *NONE, *added], save_path), save_path


@pytest.mark.slow
def test_its_scores_are_the_rewards(inputs, two_ranks):
    metrics, save_path = two_ranks
    for row in metrics:
        assert (
            row["rollout/reward"] == pytest.approx(row["rollout/reward_of_scorer3"], rel=1e-6)
            and row["rollout/reward_std"] > 0
        )
        assert row["eval/reward"] != 0 and row["critic/loss"] > 0

    shown = [json.loads(line) for line in (save_path / "samples.jsonl").read_text().splitlines()]
    assert shown

    model = rows.plain_scorer(inputs[1])
    for sample in shown:
        ids = sample["prompt_token_ids"] + sample["response_token_ids"]
        with torch.no_grad():
            score = model(torch.tensor([ids]), use_cache=False).logits.item()
        assert sample["reward"] == pytest.approx(0.5 * score, abs=1e-3)


@pytest.mark.slow
def test_in_other_layouts(inputs, two_ranks, tmp_path):
    flags, scored = inputs
    more = [f"--reward_pretrain={scored}", "--reward_model_coef=0.5"]
    layouts = [
        ["--tp_size=2"],
        ["--fsdp=false", "--zero_stage=3", "--offload_idle"],
        ["--overlap", "--early_stop_every=2"],
    ]
    runs = [
        ([*flags, *PPO, *NONE, *more, *layout], tmp_path / str(number))
        for number, layout in enumerate(layouts)
    ]
    for found in train_in_turn("train_ppo", 2, runs):
        for mine, expected in zip(repeatable(found), repeatable(two_ranks[0]), strict=True):
            assert mine.pop("engine/logprob_mismatch_max") < 1e-4
            assert mine == pytest.approx(
                {name: expected[name] for name in mine}, rel=2e-3, abs=1e-5
            )


def evaluated(flags: list[str]) -> None:
    MAINS["evaluate"](flags)


@pytest.mark.slow
def test_an_evaluation_without_training(inputs, two_ranks, tmp_path):
    """With the weights that training began from; two models of one name are told apart."""
    flags, scored = inputs
    options = [
        *flags[:2],
        flags[2].replace("prompt_data", "eval_data"),
        "--reward=none",
        "--reward_pretrain",
        scored,
        scored,
    ]

    with pytest.raises(RuntimeError, match="SystemExit: 0"):
        run_ranks(
            2,
            evaluated,
            [*options, "--engine_type=hf", "--generate_max_len=6", f"--save_path={tmp_path}"],
        )

    assert json.loads((tmp_path / "evaluation.json").read_text())["num_samples"] == 24


def test_what_cannot_judge_is_refused(inputs, tmp_path):
    flags, scored = inputs
    model = flags[1].partition("=")[2]
    cases = {
        f"--reward_pretrain {model}: 1 tensors of the model are not in the folder, the first is score.weight": [
            f"--reward_pretrain={model}"
        ],
        "--dynamic_sampling does not support --reward_pretrain, as it needs rewards": [
            f"--reward_pretrain={scored}",
            "--dynamic_sampling",
        ],
    }

    for says, added in cases.items():
        with pytest.raises(RuntimeError, match=says):
            train("train_ppo", 1, [*flags, *PPO, "--max_steps=1", *added], tmp_path)
