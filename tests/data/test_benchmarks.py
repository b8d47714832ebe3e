"""Rows of published benchmarks become prompts.

Their verifiers accept the right answer and no other.
"""

import json

import pytest

from lightrft.config.references import BENCHMARKS
from lightrft.config.sections import DataSection
from lightrft.core.samples import Prompt, Sample
from lightrft.data.benchmarks import benchmarks, with_benchmark_columns
from lightrft.data.prompts import load_prompts
from lightrft.data.readers import DataError
from lightrft.rewards.functions import rewards
from tiny import byte_tokenizer

ROWS = {
    "gsm8k": {
        "question": "Ana has 2 boxes of 621 pens. How many?",
        "answer": "2 * 621 = <<2*621=1242>>1242\n#### 1,242",
    },
    "math500": {
        "problem": "What is $1/2$ of $\\sqrt 2$?",
        "solution": "It is $\\boxed{\\frac{\\sqrt{2}}{2}}$.",
        "answer": "\\frac{\\sqrt{2}}{2}",
        "subject": "Algebra",
        "level": 2,
        "unique_id": "test/algebra/1.json",
    },
    "aime": {"ID": "2024-I-1", "Problem": "Find $m+n$.", "Solution": "...", "Answer": 33},
    "gpqa": {
        "Question": "Which is a noble gas?",
        "Correct Answer": "neon",
        "Incorrect Answer 1": "iron",
        "Incorrect Answer 2": "oxygen",
        "Incorrect Answer 3": "sodium",
        "Record ID": "rec1",
    },
}
ANSWERS = {
    "gsm8k": (
        ["2 * 621 is\n#### 1242", "#### 1,242", "The answer is 1242."],
        ["#### 1243", "1242 and 1", "none"],
    ),
    "math500": (
        ["So \\boxed{\\frac{1}{\\sqrt{2}}}", "\\boxed{\\sqrt{2}/2}"],
        ["\\boxed{\\sqrt{2}}", "no box"],
    ),
    "aime": (
        ["\\boxed{33}", "\\boxed{033}", "the answer is \\boxed{33}. (1 + 1 = 2)"],
        ["\\boxed{34}", "\\boxed{}"],
    ),
    "gpqa": (
        ["Answer: {right}", "so (A) is wrong.\nAnswer: {right}"],
        ["Answer: {wrong}", "Answer: {right} or {wrong}", "neon"],
    ),
}
"""Responses that are right, and responses that are wrong."""


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(name: str, *rows: dict, **options) -> list[Prompt]:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        section = DataSection(
            eval_data=str(tmp_path / f"{name}.jsonl"),
            input_key="other",
            label_key="another",
            input_template="no {}",
            **options,
        )

        return load_prompts(
            with_benchmark_columns(section),
            tokenizer,
            source="eval_data",
            make=benchmarks[name].make,
        )

    return load


def test_every_format_has_a_row_here():
    assert set(benchmarks) == set(BENCHMARKS) == set(ROWS) == set(ANSWERS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_verifier_tells_right_from_wrong(name, load):
    (prompt,) = load(name, ROWS[name])
    label = prompt.columns["label"]
    letters = {"right": label, "wrong": "ABCD"["ABCD".index(label) - 1]} if name == "gpqa" else {}
    texts = [
        text.format(**letters) if letters else text for group in ANSWERS[name] for text in group
    ]
    samples = [Sample(prompt, 0, [1], [0.0], text, "stop") for text in texts]
    found = rewards[benchmarks[name].reward](samples, label=[label] * len(samples))
    assert found == [1.0] * len(ANSWERS[name][0]) + [0.0] * len(ANSWERS[name][1])


def test_prompts_and_labels(load):
    assert (
        load("gsm8k", ROWS["gsm8k"])[0].text
        == "Ana has 2 boxes of 621 pens. How many?\n\nReason step by step, and write the final"
        " answer, a number, after ####."
    )
    (prompt,) = load("math500", ROWS["math500"])
    assert prompt.columns["label"] == "\\frac{\\sqrt{2}}{2}" and prompt.columns["level"] == 2
    assert load("aime", {"problem": "p", "answer": "033"})[0].columns["label"] == "33"


def test_options_are_shuffled_alike_whatever_the_other_rows_are(load):
    rows = [ROWS["gpqa"] | {"Question": f"{number}: which is a noble gas?"} for number in range(40)]
    prompts = load("gpqa", *rows)
    assert [prompt.text for prompt in load("gpqa", *rows[::-1])] == [
        prompt.text for prompt in prompts[::-1]
    ]
    labels = [prompt.columns["label"] for prompt in prompts]
    assert all(4 <= labels.count(letter) <= 18 for letter in "ABCD"), labels
    for prompt, label in zip(prompts, labels, strict=True):
        assert f"({label}) neon\n" in prompt.text
        assert all(option in prompt.text for option in ("(A) ", "(D) ", "iron", "oxygen", "sodium"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gsm8k", {"answer": "42"}, "the answer does not end with #### and a number"),
        ("gsm8k", {"question": None}, "no column 'question' with a text; it has question, answer"),
        ("math500", {"answer": " "}, "no column 'answer' with a text"),
        ("aime", {"Answer": "1/2"}, "the answer '1/2' is not an integer from 0 to 999"),
        ("gpqa", {"Incorrect Answer 2": "neon"}, "an incorrect answer equals the correct one"),
        ("gpqa", {"Incorrect Answer 3": ""}, "no column 'Incorrect Answer 3' with a text"),
    ],
)
def test_bad_rows_are_named(name, change, message, load, tmp_path):
    with pytest.raises(DataError) as error:
        load(name, ROWS[name], ROWS[name] | change)
    assert f"--eval_data: {tmp_path}/{name}.jsonl:2: " in str(error.value) and message in str(
        error.value
    )
