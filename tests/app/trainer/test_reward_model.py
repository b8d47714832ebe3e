"""train_rm takes the steps of a plain loop over the whole batch, in every layout.

The model that it trains judges in train_ppo.
"""

import json
import math
from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from app.trainer.in_turn import train_and_resume, train_in_turn
from app.trainer.judged import (
    PAIRS,
    RANK,
    RUN,
    assert_adapters_equal,
    assert_equal,
    course,
    plain,
    plain_adapters,
    score,
    write,
)
from lightrft.strategy.checkpoint.final_model import export_checkpoint
from ranks import run_cases, run_ranks
from runs import PPO, prepare, repeatable, train

THETA = 1.5
CASES = {
    "margin": ["--margin_key=margin"],
    "logexp": ["--rm_loss=logexp"],
    "ties": ["--rm_loss=ties", f"--tie_threshold={THETA}", "--tie_key=tie"],
    "heads": ["--reward_heads", "a", "b", "--head_key=head", "--learn_scale"],
}
LAYOUTS = {
    "fsdp": ["--fsdp"],
    "alone": ["--fsdp", "--micro_train_batch_size=1"],
    "zero3": ["--fsdp=false", "--zero_stage=3"],
    "zero2": ["--fsdp=false", "--zero_stage=2", "--batching=dynamic"],
    "sp": ["--fsdp", "--sp_size=2"],
    "tp": ["--fsdp", "--tp_size=2"],
    "hsdp": ["--fsdp", "--dp_replicate=2", "--batching=plain"],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    """A model with one dense head, one with two, and the data."""
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder)
    for heads in (1, 2):
        torch.manual_seed(heads)
        model = AutoModelForSequenceClassification.from_pretrained(
            folder / "model", num_labels=heads
        )
        torch.nn.init.normal_(model.score.weight, std=0.1)
        model.save_pretrained(folder / f"scorer{heads}")
        AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / f"scorer{heads}")

    return {"folder": str(folder), "data": write(PAIRS, folder / "pairs.jsonl")}


def flags(inputs: dict[str, str], case: str) -> list[str]:
    heads = 2 if case == "heads" else 1
    return [
        f"--pretrain={inputs['folder']}/scorer{heads}",
        f"--prompt_data={inputs['data']}",
        *CASES[case],
    ]


def loss_of(case: str, log_scale: torch.nn.Parameter) -> Callable[..., torch.Tensor]:
    """The formulas once more, one pair at a time."""

    def of_pair(model, row):
        chosen, rejected = (
            score(model, row["prompt"], row[name]) for name in ("chosen", "rejected")
        )
        if case == "heads":
            head = "ab".index(row["head"])
            return -torch.log(torch.sigmoid((chosen - rejected)[head] * log_scale[head].exp()))

        chosen = chosen[0]
        rejected = rejected[0]
        if case == "margin":
            return -torch.log(torch.sigmoid(chosen - rejected - row["margin"]))
        if case == "logexp":
            return torch.log(1 + torch.exp(rejected - chosen))

        wins = chosen.exp() / (chosen.exp() + THETA * rejected.exp())
        loses = rejected.exp() / (rejected.exp() + THETA * chosen.exp())
        return -torch.log(1 - wins - loses) if row["tie"] else -torch.log(wins)

    return lambda model, rows: sum(of_pair(model, row) for row in rows) / len(rows)


def scorer(inputs: dict[str, str], heads: int) -> torch.nn.Module:
    folder = f"{inputs['folder']}/scorer{heads}"
    return AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


@pytest.fixture(scope="module")
def expected(inputs) -> dict[str, tuple]:
    log_scale = torch.nn.Parameter(torch.zeros(2))
    found = {
        case: plain(scorer(inputs, 1), loss_of(case, log_scale), PAIRS)
        for case in CASES
        if case != "heads"
    }
    return found | {
        "heads": plain(scorer(inputs, 2), loss_of("heads", log_scale), PAIRS, (log_scale,))
    }


def test_steps_are_those_of_plain_torch(inputs, expected, tmp_path):
    cases = {
        case: ("train_rm", ["--fsdp", *flags(inputs, case)], f"{tmp_path}/{case}") for case in CASES
    }
    for case, (found,) in run_cases(1, course, cases).items():
        assert_equal(found, expected[case])
    assert {"train/accuracy_of_a", "train/accuracy_of_b"} <= found[0][0].keys()
    assert AutoConfig.from_pretrained(f"{tmp_path}/heads/model").id2label == {0: "a", 1: "b"}


@pytest.mark.slow
def test_layouts_do_not_change_the_steps(inputs, expected, tmp_path):
    """Two heads with a learned scale, on two ranks."""
    cases = {
        name: ("train_rm", [*layout, *flags(inputs, "heads")], f"{tmp_path}/{name}")
        for name, layout in LAYOUTS.items()
    }
    for by_rank in run_cases(2, course, cases).values():
        for found in by_rank:
            assert_equal(found, expected["heads"])


@pytest.mark.slow
def test_adapters_and_the_head_are_those_of_plain_torch(inputs, tmp_path):
    given = [*flags(inputs, "margin"), f"--lora_rank={RANK}"]
    loss = loss_of("margin", torch.nn.Parameter(torch.zeros(2)))
    expected = plain_adapters("train_rm", given, scorer(inputs, 1), loss, PAIRS, tmp_path)
    assert_adapters_equal("train_rm", given, expected, tmp_path)


def test_two_ranks_report_what_one_reports(inputs, tmp_path):
    """Accuracy, margin and rewards are taken over all ranks, in training and on held-out pairs.

    The held-out loss is the loss of the model that was saved.
    """
    given = [*flags(inputs, "margin"), f"--eval_data={inputs['data']}", "--fsdp"]
    cases = {
        size: ("train_rm", [*given, f"--max_tokens_per_microbatch={size}"], f"{tmp_path}/{size}")
        for size in (60, 400)
    }
    one, two = (
        run_cases(ranks, course, {size: cases[size]})[size][0][0]
        for ranks, size in ((1, 400), (2, 60))
    )
    for first, second in zip(repeatable(one), repeatable(two), strict=True):
        assert first == pytest.approx(second, rel=1e-4, abs=1e-6)

    model = AutoModelForSequenceClassification.from_pretrained(
        f"{tmp_path}/400/model", dtype=torch.float32
    )
    model.requires_grad_(False)
    gaps = [
        float(
            score(model, row["prompt"], row["chosen"])
            - score(model, row["prompt"], row["rejected"])
        )
        for row in PAIRS
    ]
    losses = [
        math.log(1 + math.exp(row["margin"] - gap)) for row, gap in zip(PAIRS, gaps, strict=True)
    ]
    assert one[-1]["eval/loss"] == pytest.approx(sum(losses) / 12, rel=1e-4)
    assert one[-1]["eval/accuracy"] == pytest.approx(sum(gap > 0 for gap in gaps) / 12)
    assert one[-1]["eval/margin"] == pytest.approx(sum(gaps) / 12, rel=1e-3)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_numbers(inputs, tmp_path):
    given = [
        *RUN,
        "--fsdp",
        *flags(inputs, "heads"),
        "--enable_ema",
        "--save_steps=1",
        "--num_episodes=9",
    ]
    whole, resumed = train_and_resume("train_rm", 2, given, tmp_path, stop=2, end=4)
    assert repeatable(resumed) == repeatable(whole)

    export_checkpoint(
        tmp_path / "parts" / "checkpoints", tmp_path / "parts" / "exported", name="reward_model_ema"
    )
    averaged = (tmp_path / "parts" / "exported" / "model.safetensors").read_bytes()
    assert averaged == (tmp_path / "whole" / "model_ema" / "model.safetensors").read_bytes()

    for name in ("model", "model_ema"):
        assert (tmp_path / "parts" / name / "model.safetensors").read_bytes() == (
            tmp_path / "whole" / name / "model.safetensors"
        ).read_bytes()


@pytest.mark.slow
def test_from_a_language_model_to_the_reward_of_ppo(inputs, tmp_path):
    """A new head; then the next train_rm starts from the folder, and train_ppo scores with it."""
    base = f"{inputs['folder']}/model"
    given = ["--fsdp", f"--prompt_data={inputs['data']}", *RUN]
    runs = [
        ([*given, f"--pretrain={base}", "--lora_rank=4"], tmp_path / "first"),
        ([*given, f"--pretrain={tmp_path}/first/model"], tmp_path / "second"),
    ]
    train_in_turn("train_rm", 2, runs)
    assert AutoConfig.from_pretrained(tmp_path / "second" / "model").id2label == {0: "score"}
    prompts = [flag for flag in prepare(tmp_path) if not flag.startswith("--reward")]
    judged = [f"--reward_pretrain={tmp_path}/second/model", "--reward=none", "--max_steps=1"]
    (row,) = train("train_ppo", 2, [*prompts, *PPO, *judged], tmp_path / "ppo")
    assert row["rollout/reward"] == pytest.approx(row["rollout/reward_of_model"])

    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "second" / "model", dtype=torch.float32
    )
    for line in (tmp_path / "ppo" / "samples.jsonl").read_text().splitlines():
        shown = json.loads(line)
        ids = torch.tensor([shown["prompt_token_ids"] + shown["response_token_ids"]])
        assert shown["reward"] == pytest.approx(model(ids).logits.item(), abs=1e-4)


def test_several_heads_count_by_their_mean_in_ppo(inputs, tmp_path):
    prompts = [flag for flag in prepare(tmp_path) if not flag.startswith("--reward")]
    judged = [
        f"--reward_pretrain={inputs['folder']}/scorer2",
        "--reward=none",
        "--max_steps=1",
        f"--save_path={tmp_path}/ppo",
    ]
    train("train_ppo", 1, [*prompts, *PPO, *judged], tmp_path / "ppo")
    model = AutoModelForSequenceClassification.from_pretrained(
        f"{inputs['folder']}/scorer2", dtype=torch.float32
    )
    shown = json.loads((tmp_path / "ppo" / "samples.jsonl").read_text().splitlines()[0])
    ids = torch.tensor([shown["prompt_token_ids"] + shown["response_token_ids"]])
    assert shown["reward"] == pytest.approx(model(ids).logits.mean().item(), abs=1e-4)


def test_other_heads_than_those_of_the_folder_are_refused(inputs, tmp_path):
    train(
        "train_rm", 1, [*RUN, "--fsdp", *flags(inputs, "heads"), "--max_steps=1"], tmp_path / "run"
    )
    again = [
        *RUN,
        "--fsdp",
        f"--pretrain={tmp_path}/run/model",
        f"--prompt_data={inputs['data']}",
        "--head_key=head",
    ]
    with pytest.raises(RuntimeError, match="has the heads a, b; omit the flag"):
        train("train_rm", 1, [*again, "--reward_heads", "a", "c"], tmp_path / "other")


def test_rows_that_cannot_be_compared_are_refused(inputs, tmp_path):
    cases = {
        "pairs.jsonl:2: no column 'rejected' (--rejected_key); it has prompt, chosen": {
            "prompt": "a",
            "chosen": "b",
        },
        "pairs.jsonl:2: the chosen and the rejected answer are the same": {
            "prompt": "a",
            "chosen": "b",
            "rejected": "b",
        },
        "pairs.jsonl:2: 'margin' (--margin_key) must be a finite number, not 'x'": PAIRS[0]
        | {"margin": "x"},
        "pairs.jsonl:2: both answers with the prompt have 218 tokens, more than 80": PAIRS[0]
        | {"chosen": "x" * 200},
    }
    for number, (message, row) in enumerate(cases.items()):
        (tmp_path / str(number)).mkdir()
        file = write([PAIRS[0], row, *PAIRS], tmp_path / str(number) / "pairs.jsonl")
        given = [
            "--fsdp",
            f"--pretrain={inputs['folder']}/scorer1",
            f"--prompt_data={file}",
            "--margin_key=margin",
            *RUN,
        ]
        with pytest.raises(RuntimeError) as error:
            run_ranks(1, course, "train_rm", given, f"{tmp_path}/{number}/run")
        assert message in str(error.value)
