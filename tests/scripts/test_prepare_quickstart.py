"""The quick start's tokenizer, model and problems."""

import json
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.app.quickstart.inputs import addition_problems, byte_tokenizer, tiny_qwen3
from scripts.prepare_quickstart import (
    CALL,
    CALL_END,
    TASKS,
    demonstrations,
    judged_answers,
    judged_steps,
    pairs,
    product_problems,
    sorting_problems,
)
from warm import warm_python

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_quickstart.py"
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"), seed=0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text().filter(lambda text: "<|" not in text))
def test_tokens_are_the_bytes(text):
    ids = TOKENIZER(text)["input_ids"]
    assert ids == list(text.encode()) and TOKENIZER.decode(ids) == text


def test_special_tokens():
    assert (
        TOKENIZER.pad_token_id,
        TOKENIZER.bos_token_id,
        TOKENIZER.eos_token_id,
        len(TOKENIZER),
    ) == (256, 257, 258, 259)
    assert TOKENIZER("a<|eos|>")["input_ids"] == [97, 258]
    assert TOKENIZER.decode([97, 258, 256], skip_special_tokens=True) == "a"


def test_a_call_has_a_token_at_each_end():
    tokenizer = byte_tokenizer([CALL, CALL_END])
    ids = tokenizer(f"{CALL}2*3{CALL_END}")["input_ids"]
    assert ids == [259, *b"2*3", 260]
    (call,) = pytest.importorskip("lightrft.extras.agents.tool_calls").hermes(
        tokenizer.decode(ids)
    )[1]
    assert (call.name, call.arguments) == ("calculator", {"expression": "2*3"})


def test_chat_template():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert (
        TOKENIZER.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        == "user: hi\nassistant: "
    )
    assert (
        TOKENIZER.apply_chat_template(messages, tokenize=False)
        == "user: hi\nassistant: yes<|eos|>\n"
    )


def test_model_and_tokenizer_load_from_the_folder(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.vocab_size % 8 == 0 and model.config.vocab_size >= len(tokenizer)
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (256, 257, 258)
    assert (
        tokenizer("é=")["input_ids"] == TOKENIZER("é=")["input_ids"]
        and tokenizer.chat_template == TOKENIZER.chat_template
    )


def test_weights_depend_on_the_seed_alone(folder, tmp_path):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again = tiny_qwen3(tmp_path / "again", seed=0)
    other = tiny_qwen3(tmp_path / "other", seed=1)
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, again, other)]
    assert weights[0] == weights[1] != weights[2]
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers are not touched"


def test_additions_are_all_and_right():
    train, held_out = addition_problems(seed=0)
    assert (len(train), len(held_out)) == (9_500, 500)
    assert len({problem["input"] for problem in train + held_out}) == 10_000
    for problem in train + held_out:
        a, b = problem["input"].removesuffix("=").split("+")
        assert len(problem["input"]) == 6 and len(problem["label"]) == 3
        assert int(problem["label"][::-1]) == int(a) + int(b)


def test_sorting_has_many_lengths_and_is_right():
    train, held_out = sorting_problems(seed=0)
    assert (len(train), len(held_out)) == (9_500, 500)
    assert len({problem["input"] for problem in train + held_out}) == 10_000
    assert all(
        problem["label"] == "".join(sorted(problem["input"].removesuffix(">"))) for problem in train
    )
    assert {len(problem["label"]) for problem in train} == set(range(1, 17))


def test_a_quarter_of_the_demonstrations_are_right():
    hermes = pytest.importorskip("lightrft.extras.agents.tool_calls").hermes
    calculator = import_module("lightrft.extras.agents.builtin_tools").calculator
    train, held_out = product_problems(seed=0)
    assert (len(train), len(held_out)) == (7_600, 500)
    right = 0
    called = 0

    for problem, row in zip(train, demonstrations(train, 0), strict=True):
        question, *calls, answer = [message["content"] for message in row["messages"]]
        right += bool(calls) and answer == problem["label"]
        for call, result in zip(calls[::2], calls[1::2], strict=True):
            assert answer == result == calculator(hermes(call)[1][0].arguments["expression"])
            called += 1

    assert (right, called) == (1_900, 2_850)


@pytest.mark.parametrize("task", TASKS)
def test_problems_depend_on_the_seed_alone(task):
    assert TASKS[task](3) == TASKS[task](3) != TASKS[task](4)


@pytest.mark.slow
def test_command_writes_everything(tmp_path):
    command = [
        warm_python(),
        str(SCRIPT),
        "--out",
        str(tmp_path),
        "--seed",
        "5",
        "--task",
        "sorting",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)

    train, held_out = sorting_problems(seed=5)
    for name, problems in (("train", train), ("test", held_out)):
        assert [
            json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
        ] == problems

    assert (tmp_path / "model" / "config.json").exists() and (
        tmp_path / "model" / "tokenizer.json"
    ).exists()


@pytest.mark.parametrize("task", TASKS)
def test_judged_answers_are_right_but_for_one_character(task):
    problems = TASKS[task](0)[1]
    made = zip(
        problems,
        pairs(problems, 0),
        judged_answers(problems, 0),
        judged_steps(problems, 0),
        strict=True,
    )

    for problem, pair, answer, steps in made:
        different = [
            one != other for one, other in zip(pair["chosen"], pair["rejected"], strict=True)
        ]
        assert (
            pair["prompt"] == problem["input"]
            and pair["chosen"] == problem["label"]
            and sum(different) == 1
        )
        assert answer["label"] is (answer["completion"] == problem["label"])
        assert "".join(steps["completions"]) == pair["rejected"] and steps["labels"] == [
            not one for one in different
        ]
