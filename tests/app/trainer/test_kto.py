"""train_kto takes the steps of a plain loop over the whole batch.

It does so in every layout, with one reference point for a step.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from app.trainer.judged import (
    LAYOUTS,
    PAIRS,
    RANK,
    answer_logprobs,
    assert_adapters_equal,
    assert_equal,
    course,
    plain,
    plain_adapters,
    write,
)
from ranks import run_cases
from runs import prepare, repeatable

BETA = 0.3
GOOD = 1.3
BAD = 0.7
ROWS = [
    {"prompt": row["prompt"], "completion": row["chosen"], "label": index % 3 > 0}
    for index, row in enumerate(PAIRS)
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder)
    data = write(ROWS, folder / "answers.jsonl")
    weights = [f"--desirable_weight={GOOD}", f"--undesirable_weight={BAD}"]
    return [f"--pretrain={folder}/model", f"--prompt_data={data}", f"--beta={BETA}", *weights]


def model_of(inputs: list[str]) -> nn.Module:
    folder = inputs[0].partition("=")[2]
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def loss_of(reference: nn.Module) -> Callable[..., Tensor]:
    """The formulas once more, one answer at a time."""
    reference.requires_grad_(False)

    def log_ratio(model, prompt, answer):
        return (
            answer_logprobs(model, prompt, answer).sum()
            - answer_logprobs(reference, prompt, answer).sum()
        )

    def of_step(model, rows):
        with torch.no_grad():
            others = [
                log_ratio(model, row["prompt"], rows[index - len(rows) + 1]["completion"])
                for index, row in enumerate(rows)
            ]

        point = torch.stack(others).mean().clamp(min=0)
        total = 0.0
        for row in rows:
            reward = BETA * (log_ratio(model, row["prompt"], row["completion"]) - point)
            total += (
                GOOD * (1 - torch.sigmoid(reward))
                if row["label"]
                else BAD * (1 - torch.sigmoid(-reward))
            )

        return total / len(rows)

    return of_step


@pytest.fixture(scope="module")
def expected(inputs) -> tuple:
    return plain(model_of(inputs), loss_of(model_of(inputs)), ROWS)


def test_steps_are_those_of_plain_torch(inputs, expected, tmp_path):
    ((found,),) = run_cases(
        1, course, {"": ("train_kto", ["--fsdp", *inputs], f"{tmp_path}/run")}
    ).values()
    assert_equal(found, expected)
    assert found[0][-1]["train/kl"] > 0, "the reference point is not that of the clamp alone"


@pytest.mark.slow
def test_layouts_do_not_change_the_steps(inputs, expected, tmp_path):
    layouts = LAYOUTS | {"zero2": ["--fsdp=false", "--zero_stage=2", "--micro_train_batch_size=1"]}
    cases = {
        name: ("train_kto", [*layout, *inputs], f"{tmp_path}/{name}")
        for name, layout in layouts.items()
    }
    for by_rank in run_cases(2, course, cases).values():
        for found in by_rank:
            assert_equal(found, expected)


@pytest.mark.slow
def test_adapters_are_those_of_plain_torch(inputs, tmp_path):
    """Their reference is the model without them."""
    flags = [*inputs, f"--lora_rank={RANK}"]
    expected = plain_adapters(
        "train_kto", flags, model_of(inputs), loss_of(model_of(inputs)), ROWS, tmp_path
    )
    assert_adapters_equal("train_kto", flags, expected, tmp_path)


@pytest.mark.slow
def test_two_ranks_report_what_one_reports(inputs, tmp_path):
    flags = [*inputs, inputs[1].replace("prompt_data", "eval_data"), "--fsdp", "--eval_steps=1"]
    one, two = (
        run_cases(ranks, course, {"": ("train_kto", flags, f"{tmp_path}/{ranks}")})[""][0][0]
        for ranks in (1, 2)
    )
    for first, second in zip(repeatable(one), repeatable(two), strict=True):
        assert first == pytest.approx(second, rel=1e-4, abs=1e-6)
    assert {
        "eval/loss",
        "eval/accuracy",
        "eval/reward_desirable",
        "eval/reward_undesirable",
        "eval/kl",
    } <= one[0].keys()
