"""Supervised fine-tuning: the loss is the mean over all answer tokens, on any number of ranks, and
it falls.
"""

import json
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.trainer.judged import (
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
from lightrft.app.observe.sinks import read_rows
from lightrft.app.quickstart.inputs import addition_problems, tiny_qwen3, write_jsonl
from ranks import run_cases
from runs import prepare, train

SFT = [
    "--train_batch_size=8",
    "--num_episodes=20",
    "--actor_learning_rate=3e-3",
    "--lr_scheduler=constant",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    flags = [flag for flag in prepare(folder) if not flag.startswith("--reward")]
    return [*flags, f"--eval_data={folder}/train.jsonl", "--eval_steps=1"]


def test_held_out_loss_is_that_of_transformers(inputs, tmp_path):
    """The loss after one step is what plain transformers finds in the saved model.

    It is the mean over answer tokens.
    """
    rows = train(
        "train_sft", 2, [*inputs, *SFT, "--max_steps=1", "--max_tokens_per_microbatch=32"], tmp_path
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    total = 0.0
    count = 0

    for number in range(24):
        prompt = tokenizer("abcdefgh"[: 2 + number % 5] + "=")["input_ids"]
        answer = tokenizer(str(number))["input_ids"] + [tokenizer.eos_token_id]
        logprobs = (
            model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        )
        total -= logprobs.gather(1, torch.tensor(answer)[:, None]).sum().item()
        count += len(answer)

    assert rows[0]["eval/loss"] == pytest.approx(total / count, rel=1e-5)


def test_loss_falls_and_the_run_stops_when_it_is_low_enough(inputs, tmp_path):
    rows = train("train_sft", 1, [*inputs, *SFT, "--max_steps=60", "--stop_loss=2.0"], tmp_path)
    assert len(rows) < 60
    assert rows[-1]["train/loss"] < 2.0 < rows[0]["train/loss"]
    assert min(row["train/loss"] for row in rows[:-1]) >= 2.0


@pytest.mark.slow
def test_sft_learns_with_its_defaults(tmp_path):
    """With no flag about learning, the loss of a random model falls by more than a tenth of a nat.

    75 steps go three times over 1,600 additions.
    """
    tiny_qwen3(tmp_path / "model", seed=0)
    write_jsonl(tmp_path / "rows.jsonl", addition_problems(seed=0)[0][:1600])
    flags = [
        "--fsdp",
        f"--pretrain={tmp_path}/model",
        f"--prompt_data={tmp_path}/rows.jsonl",
        "--report_to=jsonl",
    ]
    losses = [row["train/loss"] for row in train("train_sft", 1, flags, tmp_path / "run")]
    assert len(losses) == 75
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.1


@pytest.mark.slow
def test_conversations_are_learned_turn_by_turn(inputs, tmp_path):
    """The held-out loss after one step is what plain transformers finds over all answers.

    The tokens of the answers are written by hand.
    """
    file = tmp_path / "chats.jsonl"
    turns = [
        [("user", f"{n}?"), ("assistant", f"{n}{n}"), ("user", "x" * (n % 3)), ("assistant", "yes")]
        for n in range(8)
    ]
    rows = [
        {"messages": [{"role": role, "content": f"{text}."} for role, text in chat]}
        for chat in turns
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = next(flag for flag in inputs if "pretrain=" in flag).partition("=")[2]
    shutil.copytree(folder, tmp_path / "pretrain")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% if m.role == 'assistant' %}"
    )

    tokenizer.chat_template += (
        "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "pretrain")
    flags = [
        *inputs,
        *SFT,
        f"--pretrain={tmp_path / 'pretrain'}",
        f"--prompt_data={file}",
        f"--eval_data={file}",
    ]
    found = train(
        "train_sft", 2, [*flags, "--apply_chat_template", "--max_steps=1"], tmp_path / "run"
    )
    shown = read_rows(tmp_path / "run" / "samples.jsonl")
    page = (tmp_path / "run" / "report.html").read_text()
    assert len(shown) == 6 and shown[0]["prompt"][0] == "u" and "⟦ and ⟧" in page
    assert re.fullmatch(r"⟦(\d)\1\.<\|eos\|>⟧ux*\.a⟦yes\.<\|eos\|>⟧", shown[0]["response"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)

    total = 0.0
    count = 0
    for chat in turns:
        ids = []
        learned = []
        for role, text in chat:
            ids += [*role[:1].encode(), *f"{text}.".encode()] + [tokenizer.eos_token_id] * (
                role == "assistant"
            )
            learned += [False] + [role == "assistant"] * (len(ids) - len(learned) - 1)

        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        logprobs = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0][
            torch.tensor(learned[1:])
        ]
        total = total - logprobs.sum().item()
        count = count + len(logprobs)

    assert found[0]["eval/loss"] == pytest.approx(total / count, rel=1e-5)


LAYOUTS = {
    "fsdp": ["--fsdp"],
    "zero2": ["--fsdp=false", "--zero_stage=2", "--micro_train_batch_size=1"],
    "zero3": ["--fsdp=false", "--zero_stage=3"],
    "sp": ["--fsdp", "--sp_size=2"],
    "tp": ["--fsdp", "--tp_size=2"],
    "hsdp": ["--fsdp", "--dp_replicate=2"],
}


def model_of(flags: list[str]) -> torch.nn.Module:
    folder = next(flag for flag in flags if "pretrain=" in flag).partition("=")[2]
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def mean_over_tokens(model, rows) -> torch.Tensor:
    return -torch.cat([answer_logprobs(model, row["prompt"], row["chosen"]) for row in rows]).mean()


@pytest.fixture(scope="module")
def answers(inputs, tmp_path_factory) -> tuple[list[str], tuple]:
    """Return flags, and three steps in plain torch over the whole batch.

    The loss is the mean over all tokens of all answers.
    """
    folder = next(flag for flag in inputs if "pretrain=" in flag).partition("=")[2]
    data = write(PAIRS, tmp_path_factory.mktemp("answers") / "answers.jsonl")
    flags = [
        f"--pretrain={folder}",
        f"--prompt_data={data}",
        "--input_key=prompt",
        "--label_key=chosen",
    ]
    return flags, plain(model_of(flags), mean_over_tokens, PAIRS)


def test_steps_are_those_of_plain_torch(answers, tmp_path):
    flags, expected = answers
    ((found,),) = run_cases(
        1, course, {"": ("train_sft", ["--fsdp", *flags], f"{tmp_path}/run")}
    ).values()
    assert_equal(found, expected)


@pytest.mark.slow
def test_layouts_do_not_change_the_steps(answers, tmp_path):
    flags, expected = answers
    cases = {
        name: ("train_sft", [*layout, *flags], f"{tmp_path}/{name}")
        for name, layout in LAYOUTS.items()
    }
    for by_rank in run_cases(2, course, cases).values():
        for found in by_rank:
            assert_equal(found, expected)


@pytest.mark.slow
def test_adapters_are_those_of_plain_torch(answers, tmp_path):
    flags = [*answers[0], f"--lora_rank={RANK}"]
    expected = plain_adapters(
        "train_sft", flags, model_of(flags), mean_over_tokens, PAIRS, tmp_path
    )
    assert_adapters_equal("train_sft", flags, expected, tmp_path)
