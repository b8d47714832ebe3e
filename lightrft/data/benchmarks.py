"""Read benchmarks in the columns that they are published with.

A benchmark has a prompt, the right answer and a verifier. Its instruction asks for the answer in
the form that the verifier reads. The names are used in --eval_data.
"""

import hashlib
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
"""Columns that a benchmark adds to the rows: the prompt and the right answer."""
LETTERS = "ABCD"


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
        question, answer = self.read(row)
        text = f"{question}\n\n{self.instruction}"
        return make_prompt(context, row | {INPUT_FORM: text, LABEL: answer})


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


def _gpqa(row: dict[str, Any]) -> tuple[str, str]:
    """Return the question with the options, and the letter of the right one.

    The options are ordered by a hash of each with the question: the same order in every run, on any
    rank, for any other rows.
    """
    question = _text(row, "Question")
    right = _text(row, "Correct Answer")
    options = [right, *(_text(row, f"Incorrect Answer {number}") for number in (1, 2, 3))]
    if options.count(right) > 1:
        raise ValueError("an incorrect answer equals the correct one")
    options.sort(key=lambda option: hashlib.sha256(f"{question}\n{option}".encode()).digest())
    listed = "\n".join(
        f"({letter}) {option}" for letter, option in zip(LETTERS, options, strict=True)
    )
    return f"{question}\n\n{listed}", LETTERS[options.index(right)]


READERS = {"gsm8k": _gsm8k, "math500": _math500, "aime": _aime, "gpqa": _gpqa}
benchmarks = {
    name: Benchmark(READERS[name], **details) for name, details in table("data/benchmarks").items()
}
"""Name of a format -> the benchmark.

GSM8K has the columns question and answer; MATH-500 problem and answer; AIME problem and answer, or
Problem and Answer; GPQA Question, Correct Answer and Incorrect Answer 1 to 3.
"""
