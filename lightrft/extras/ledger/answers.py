"""What a reward reads as the answer of a response; equal answers are equal texts."""

from collections.abc import Callable
from typing import Any

from lightrft.config.references import reward_terms
from lightrft.rewards.functions import boxes, chosen_letter, last_number, right_answers

Reader = Callable[[str], str | None]


def _number(text: str) -> str | None:
    number = last_number(text)
    return None if number is None else str(number)


def _math(text: str) -> str | None:
    boxed = boxes(text)
    if not boxed:
        return _number(text)
    content = "".join(boxed[-1][1].split())
    return _number(content) if content.lstrip("-").replace(".", "").isdigit() else content


ANSWER_READERS: dict[str, Reader] = {
    "exact_match": str.strip,
    "number": _number,
    "gsm8k": _number,
    "math": _math,
    "choice": chosen_letter,
}
"""Reward -> what it reads as the answer; None for a response without one."""


def answer_reader(reward: str) -> Reader | None:
    """Return what reads the answers for --reward; None if no term of it has answers."""
    return next(
        (ANSWER_READERS[term.name] for term in reward_terms(reward) if term.name in ANSWER_READERS),
        None,
    )


def labels_of(label: Any, answer: Reader | None) -> list[str]:
    """Return the right answers of a row as `answer` reads them; none if the label is no answer."""
    try:
        texts = right_answers(label)
    except ValueError:
        return []
    if answer is _math:  # the label of a row is an answer, with a box around it or without
        texts = [text if boxes(text) else rf"\boxed{{{text}}}" for text in texts]
    return [(answer and answer(text)) or text for text in texts]
