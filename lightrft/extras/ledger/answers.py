"""What a reward reads as the answer of a response; equal answers are equal texts."""

import json
from collections.abc import Callable

from lightrft.config.references import reward_terms
from lightrft.rewards.functions import boxes, chosen_letter, last_number

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


def _json(text: str) -> str | None:
    block = text.rpartition("```json")[2].partition("```")[0] if "```json" in text else text
    try:
        return json.dumps(json.loads(block), sort_keys=True)
    except (ValueError, RecursionError):
        return None


ANSWER_READERS: dict[str, Reader] = {
    "exact_match": str.strip,
    "number": _number,
    "gsm8k": _number,
    "math": _math,
    "choice": chosen_letter,
    "json_schema": _json,
}
"""Reward -> what it reads as the answer; None for a response without one."""


def answer_reader(reward: str) -> Reader | None:
    """Return what reads the answers for --reward; None if no term of it has answers."""
    return next(
        (ANSWER_READERS[term.name] for term in reward_terms(reward) if term.name in ANSWER_READERS),
        None,
    )
