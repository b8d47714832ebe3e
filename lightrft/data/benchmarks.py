"""Read benchmarks in the columns that they are published with.

A benchmark has a prompt, the right answer and a verifier. Its instruction asks for the answer in
the form that the verifier reads. The names are used in --eval_data.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightrft.config.sections import DataSection
from lightrft.config.tables import table
from lightrft.core.samples import Prompt
from lightrft.data.prompts import RowContext, make_prompt

INPUT_FORM = "input"
LABEL = "label"
TESTS = "tests"
"""Columns that a benchmark adds to the rows: the prompt, and the right answer or tests of it."""
LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Format of a benchmark's rows and answers."""

    read: Callable[[dict[str, Any]], tuple[str, str]]
    """Function of a row that returns the question and the right answer.

    It raises ValueError for a bad row.
    """
    instruction: str
    """Text after the question."""
    reward: str
    """Name of the verifier among the rewards; it gives 1 to a right response and 0 to another."""

    def make(self, context: RowContext, row: dict[str, Any]) -> Prompt:
        """Build a prompt from a row, as make_prompt() does."""
        try:
            question, answer = self.read(row)
        except (LookupError, TypeError) as error:
            raise ValueError(f"it has other columns than the benchmark: {error!r}") from error
        text = f"{question}\n\n{self.instruction}"
        return make_prompt(context, row | {INPUT_FORM: text, LABEL: answer, TESTS: answer})


def with_benchmark_columns(section: DataSection) -> DataSection:
    """Return the section for prompts of a benchmark, with its columns and instruction.

    Chat template and limits stay the same as for other prompts.
    """
    keys = {"eval_input_key": INPUT_FORM, "eval_label_key": LABEL}
    return replace(section, **keys, reference_key=None, images_key=None, input_template=None)


def _text(row: dict[str, Any], *names: str) -> str:
    """Return the text of the first of these columns that the row has."""
    value = next((row[name] for name in names if row.get(name) is not None), None)
    if value is None or not str(value).strip():
        raise ValueError(
            f"no column {' or '.join(map(repr, names))} with a text; it has"
            f" {', '.join(row) or 'none'}"
        )
    return str(value).strip()


def _gsm8k(row: dict[str, Any]) -> tuple[str, str]:
    _, marker, answer = _text(row, "answer").rpartition("####")
    if not marker or not re.search(r"\d", answer):
        raise ValueError("the answer does not end with #### and a number")
    return _text(row, "question"), answer.strip().replace(",", "")


def _math500(row: dict[str, Any]) -> tuple[str, str]:
    return _text(row, "problem"), _text(row, "answer")


def _aime(row: dict[str, Any]) -> tuple[str, str]:
    answer = _text(row, "answer", "Answer")
    if not re.fullmatch(r"\d{1,3}", answer):
        raise ValueError(f"the answer {answer!r} is not an integer from 0 to 999")
    return _text(row, "problem", "Problem"), str(int(answer))


def _math(row: dict[str, Any]) -> tuple[str, str]:
    _, mark, rest = _text(row, "solution").rpartition("\\boxed")
    if not mark:
        raise ValueError("the solution has no \\boxed{answer}")
    return _text(row, "problem"), mark + rest


def _gpqa(row: dict[str, Any]) -> tuple[str, str]:
    names = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
    return _shuffled(_text(row, "Question"), *(_text(row, name) for name in names))


def _truthfulqa(row: dict[str, Any]) -> tuple[str, str]:
    targets = row["mc1_targets"]
    ranked = sorted(zip(targets["labels"], targets["choices"], strict=True), reverse=True)
    right, *wrong = (choice for _, choice in ranked)
    return _shuffled(_text(row, "question"), right, *wrong[: len(LETTERS) - 1])


def _mmlu(row: dict[str, Any]) -> tuple[str, str]:
    options = row["options" if "options" in row else "choices"]
    answer = row["answer"]
    index = LETTERS.index(answer) if isinstance(answer, str) else answer
    return _listed(_text(row, "question"), options, index)


def _arc(row: dict[str, Any]) -> tuple[str, str]:
    choices = row["choices"]
    index = choices["label"].index(_text(row, "answerKey"))
    return _listed(_text(row, "question"), choices["text"], index)


def _humaneval(row: dict[str, Any]) -> tuple[str, str]:
    tests = f"{_text(row, 'test')}\n\ncheck({_text(row, 'entry_point')})"
    return f"Complete this function:\n\n```python\n{_text(row, 'prompt')}\n```", tests


def _mbpp(row: dict[str, Any]) -> tuple[str, str]:
    imports = row.get("test_imports", row.get("test_setup_code", ""))
    texts = [*([imports] if isinstance(imports, str) else imports), *row["test_list"]]
    examples = "\n".join(row["test_list"])
    tests = json.dumps([text for text in texts if text])
    return f"{_text(row, 'prompt', 'text')}\n\nIt must pass:\n\n{examples}", tests


def _shuffled(question: str, right: str, *wrong: str) -> tuple[str, str]:
    """Return the question with the options, and the letter of the right one.

    The options are ordered by a hash of each with the question: the same order in every run, on any
    rank, for any other rows.
    """
    if right in wrong:
        raise ValueError("an incorrect answer equals the correct one")
    options = [right, *wrong]
    options.sort(key=lambda option: hashlib.sha256(f"{question}\n{option}".encode()).digest())
    return _listed(question, options, options.index(right))


def _listed(question: str, options: list[str], index: int) -> tuple[str, str]:
    """Return the question with the options as they are ordered, and the letter of the right one."""
    if not 0 <= index < len(options) <= len(LETTERS):
        raise ValueError(
            f"option {index} of {len(options)}, of at most {len(LETTERS)}, is no answer"
        )
    listed = "\n".join(
        f"({letter}) {option}" for letter, option in zip(LETTERS, options, strict=False)
    )
    return f"{question}\n\n{listed}", LETTERS[index]


READERS = {
    "gsm8k": _gsm8k,
    "math500": _math500,
    "hendrycks_math": _math,
    "aime": _aime,
    "gpqa": _gpqa,
    "truthfulqa": _truthfulqa,
    "mmlu": _mmlu,
    "arc": _arc,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
}
benchmarks = {
    name: Benchmark(**details | {"read": READERS[details["read"]]})
    for name, details in table("data/benchmarks").items()
}
"""Name of a format -> the benchmark; docs/evaluation.md has its columns."""
