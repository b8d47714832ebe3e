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
    "gsm_symbolic": {
        "id": 0,
        "instance": 3,
        "question": "Ivo has 31 nuts and eats 12. How many are left?",
        "answer": "31 - 12 = 19\n#### 19",
        "original_question": "Ana has 9 nuts and eats 2. How many are left?",
    },
    "amc": {"id": 0, "problem": "What is $3!$ plus 1?", "answer": 7.0, "url": "none"},
    "hendrycks_math": {
        "problem": "Simplify $\\frac{2}{6}$.",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "Not \\boxed{\\frac{2}{6}}, but $\\boxed{\\frac{1}{3}}$.",
    },
    "truthfulqa": {
        "question": "What falls from a cloud of rain?",
        "mc1_targets": {"choices": ["frogs", "water", "milk"], "labels": [0, 1, 0]},
        "mc2_targets": {"choices": ["frogs", "water"], "labels": [0, 1]},
    },
    "mmlu": {
        "question": "Which number is even?",
        "subject": "elementary_mathematics",
        "choices": ["1", "3", "4", "5"],
        "answer": 2,
    },
    "mmlu_pro": {
        "question_id": 70,
        "question": "Which number is prime?",
        "options": ["1", "4", "6", "8", "9", "10", "12", "14", "11", "15"],
        "answer": "I",
        "answer_index": 8,
        "category": "math",
    },
    "arc": {
        "id": "q1",
        "question": "What do plants need?",
        "choices": {"text": ["sand", "light", "salt"], "label": ["1", "2", "3"]},
        "answerKey": "2",
    },
    "humaneval": {
        "task_id": "Own/0",
        "prompt": 'def twice(x: int) -> int:\n    """Return twice the number."""\n',
        "canonical_solution": "    return 2 * x\n",
        "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2) == 4\n"
        "    assert candidate(-1) == -2\n",
        "entry_point": "twice",
    },
    "mbpp": {
        "task_id": 1,
        "prompt": "Write a function that returns the larger of two numbers.",
        "code": "def larger(a, b):\n    return max(a, b)",
        "test_imports": [],
        "test_list": ["assert larger(1, 2) == 2", "assert larger(5, -3) == 5"],
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
    "gsm_symbolic": (["#### 19"], ["#### 7", "none"]),
    "amc": (["\\boxed{7}", "\\boxed{7.0}"], ["\\boxed{8}"]),
    "hendrycks_math": (["\\boxed{\\frac13}", "\\boxed{1/3}"], ["\\boxed{0.3}", "\\frac{1}{6}"]),
    "truthfulqa": (["Answer: {right}"], ["Answer: {wrong}", "water"]),
    "mmlu": (["Answer: C", "\\boxed{C}"], ["Answer: B", "4"]),
    "mmlu_pro": (["Answer: I"], ["Answer: J", "eleven"]),
    "arc": (["Answer: B"], ["Answer: 2 and 3", "Answer: C"]),
    "humaneval": (
        ["```python\ndef twice(x):\n    return x + x\n```", "def twice(x: int):\n    return x * 2"],
        ["```python\ndef twice(x):\n    return x ** 2\n```", "return 2 * x"],
    ),
    "mbpp": (
        ["```python\nlarger = max\n```", "def larger(a, b):\n    return a if a > b else b"],
        ["```python\ndef larger(a, b):\n    return b\n```", "max"],
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
    letters = {}
    if name in ("gpqa", "truthfulqa"):
        letters = {
            "right": label,
            "wrong": "ABC"["ABC".index(label) - 1] if label in "ABC" else "A",
        }
    texts = [
        text.format(**letters) if letters else text for group in ANSWERS[name] for text in group
    ]
    samples = [Sample(prompt, 0, [1], [0.0], text, "stop") for text in texts]
    columns = {"label": [label] * len(samples), "tests": [label] * len(samples)}
    found = rewards[benchmarks[name].reward](samples, **columns)
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
        ("hendrycks_math", {"solution": "It is 1/3."}, "the solution has no \\boxed{answer}"),
        ("mmlu", {"answer": 4}, "option 4 of 4, of at most 10, is no answer"),
        ("mmlu", {"choices": None}, "it has other columns than the benchmark: TypeError"),
        ("mmlu_pro", {"answer": "none"}, "substring not found"),
        ("arc", {"answerKey": "D"}, "'D' is not in list"),
        ("humaneval", {"test": ""}, "no column 'test' with a text"),
        ("mbpp", {"test_list": 5}, "it has other columns than the benchmark: TypeError"),
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
