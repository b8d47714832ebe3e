"""train_dpo takes the steps of a plain loop over the whole batch.

It does so in every layout, and with any reference.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from app.trainer.judged import (
    PAIRS,
    RANK,
    answer_logprobs,
    assert_equal,
    course,
    plain,
    plain_adapters,
    write,
)
from ranks import run_cases
from runs import prepare, repeatable

BETA = 0.3
EPSILON = 0.2
COEFFICIENT = 0.7
CASES = {
    "smoothed": [f"--label_smoothing={EPSILON}", f"--sft_coef={COEFFICIENT}"],
    "ipo": ["--dpo_loss=ipo", "--length_normalized"],
    "hinge": ["--dpo_loss=hinge"],
    "simpo": ["--dpo_loss=simpo", "--simpo_gamma=0.4"],
    "orpo": ["--dpo_loss=orpo", f"--sft_coef={COEFFICIENT}"],
    "bco": ["--dpo_loss=bco", "--ld_alpha=0.5", "--precompute_reference"],
}
LAYOUTS = {
    "fsdp": ["--fsdp"],
    "alone": ["--fsdp", "--micro_train_batch_size=1", "--precompute_reference"],
    "zero3": ["--fsdp=false", "--zero_stage=3", "--offload_idle"],
    "zero2": ["--fsdp=false", "--zero_stage=2", "--precompute_reference"],
    "sp": ["--fsdp", "--sp_size=2", "--max_tokens_per_logprob_microbatch=120"],
    "tp": ["--fsdp", "--tp_size=2"],
    "hsdp": ["--fsdp", "--dp_replicate=2"],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder)
    data = write(PAIRS, folder / "pairs.jsonl")
    return [f"--pretrain={folder}/model", f"--prompt_data={data}", f"--beta={BETA}"]


def model_of(inputs: list[str]) -> nn.Module:
    folder = inputs[0].partition("=")[2]
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def loss_of(case: str, reference: nn.Module) -> Callable[..., Tensor]:
    """The formulas once more, one pair at a time."""
    reference.requires_grad_(False)

    def log_ratio(model, row, name):
        ours, theirs = (
            answer_logprobs(each, row["prompt"], row[name]) for each in (model, reference)
        )
        if case == "bco":
            shorter = min(
                len(answer_logprobs(reference, row["prompt"], row[each]))
                for each in ("chosen", "rejected")
            )
            ratios = ours - theirs
            return ratios[:shorter].sum() + 0.5 * ratios[shorter:].sum()
        return (ours - theirs).mean() if case == "ipo" else (ours - theirs).sum()

    def of_pair(model, row):
        if case in ("simpo", "orpo"):
            good, bad = (
                answer_logprobs(model, row["prompt"], row[name]).mean()
                for name in ("chosen", "rejected")
            )
            if case == "simpo":
                return -torch.log(torch.sigmoid(BETA * (good - bad) - 0.4))
            odds = [mean.exp() / (1 - mean.exp()) for mean in (good, bad)]
            return -BETA * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
        if case == "bco":
            good, bad = (BETA * log_ratio(model, row, name) for name in ("chosen", "rejected"))
            return -torch.log(torch.sigmoid(good)) - torch.log(torch.sigmoid(-bad))
        difference = log_ratio(model, row, "chosen") - log_ratio(model, row, "rejected")
        if case == "ipo":
            return (difference - 1 / (2 * BETA)) ** 2
        if case == "hinge":
            return (1 - BETA * difference).clamp(min=0)
        right = torch.sigmoid(BETA * difference)
        return -(1 - EPSILON) * torch.log(right) - EPSILON * torch.log(1 - right)

    def of_step(model, rows):
        loss = sum(of_pair(model, row) for row in rows) / len(rows)
        if case in ("smoothed", "orpo"):
            loss -= (
                COEFFICIENT
                * torch.cat(
                    [answer_logprobs(model, row["prompt"], row["chosen"]) for row in rows]
                ).mean()
            )
        return loss

    return of_step


@pytest.fixture(scope="module")
def expected(inputs) -> dict[str, tuple]:
    return {case: plain(model_of(inputs), loss_of(case, model_of(inputs)), PAIRS) for case in CASES}


def test_steps_are_those_of_plain_torch(inputs, expected, tmp_path):
    cases = {
        case: ("train_dpo", ["--fsdp", *inputs, *more], f"{tmp_path}/{case}")
        for case, more in CASES.items()
    }
    for case, (found,) in run_cases(1, course, cases).items():
        assert_equal(found, expected[case])


@pytest.mark.slow
def test_layouts_do_not_change_the_steps(inputs, expected, tmp_path):
    flags = [*inputs, *CASES["smoothed"]]
    cases = {
        name: ("train_dpo", [*layout, *flags], f"{tmp_path}/{name}")
        for name, layout in LAYOUTS.items()
    }
    for by_rank in run_cases(2, course, cases).values():
        for found in by_rank:
            assert_equal(found, expected["smoothed"])


@pytest.mark.slow
def test_two_ranks_report_what_one_reports(inputs, tmp_path, monkeypatch):
    """One rank computes the reference live; two take it computed in advance, with data from a file.

    The reports agree, on held-out pairs too.
    """
    flags = [
        *inputs,
        *CASES["smoothed"],
        inputs[1].replace("prompt_data", "eval_data"),
        "--fsdp",
        "--eval_steps=1",
    ]
    (one,) = run_cases(
        1,
        course,
        {"live": ("train_dpo", [*flags, "--max_tokens_per_microbatch=400"], f"{tmp_path}/one")},
    )["live"]
    monkeypatch.setattr("lightrft.app.trainer.tasks.dpo.PAIRS_AT_ONCE", 5)  # three chunks
    known = [*flags, "--precompute_reference", f"--data_cache={tmp_path}/cache"]
    two = run_cases(2, course, {"known": ("train_dpo", known, f"{tmp_path}/two")})["known"][0]
    for first, second in zip(repeatable(one[0]), repeatable(two[0]), strict=True):
        assert first == pytest.approx(second, rel=1e-4, abs=1e-6)

    assert [
        row[name] for (row, *_) in (one[0], two[0]) for name in ("train/accuracy", "train/margin")
    ] == [0, 0, 0, 0]
    last = one[0][-1]
    assert last["eval/margin"] == pytest.approx(
        last["eval/reward_chosen"] - last["eval/reward_rejected"], abs=1e-6
    )
    assert last["eval/loss"] < one[0][0]["train/loss"] and last["eval/accuracy"] > 0.5


@pytest.mark.slow
def test_adapters_have_their_base_as_the_reference(inputs, tmp_path):
    """The reference is the base of the adapters, computed live or before the first step.

    The expected numbers come from a plain loop over PEFT's model with the same first adapters.
    """
    flags = [*inputs, *CASES["smoothed"], f"--lora_rank={RANK}"]
    cases = {
        name: (
            "train_dpo",
            [*flags, "--precompute_reference=" + known, *layout],
            f"{tmp_path}/{name}",
        )
        for name, known, layout in (
            ("fsdp", "false", ["--fsdp"]),
            ("known", "true", ["--fsdp"]),
            ("zero2", "false", ["--fsdp=false"]),
        )
    }
    base = model_of(inputs)
    expected = plain_adapters(
        "train_dpo", flags, base, loss_of("smoothed", copy.deepcopy(base)), PAIRS, tmp_path
    )

    for by_rank in run_cases(2, course, cases).values():
        for each in by_rank:
            assert_equal(each, expected)
