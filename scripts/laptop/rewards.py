"""Rewards of the recipes for a laptop.

They are plain functions of the samples of a prompt and of the columns of its row.

--reward scripts/laptop/rewards.py:follows
"""

import json
import re
from typing import Any


def follows(samples: list[Any], checks: list[list[str]], **columns: Any) -> list[float]:
    """Return 1 if a response passes all checks of its row, else 0."""
    return [float(share == 1.0) for share in share_passed(samples, checks)]


def share_passed(samples: list[Any], checks: list[list[str]], **columns: Any) -> list[float]:
    """Return the share of the row's checks that a response passes.

    It is 0 if the response did not end by itself.
    """
    return [
        0.0
        if sample.truncated
        else sum(passes(check, sample.text.strip()) for check in of_row) / len(of_row)
        for sample, of_row in zip(samples, checks, strict=True)
    ]


def brief(samples: list[Any], **columns: Any) -> list[float]:
    """Return the brevity of each response."""
    return [brevity(sample.text, sample.truncated) for sample in samples]


def brevity(text: str, truncated: bool) -> float:
    """Return 10 / (10 + words) for a response of whole sentences, else 0.

    It must have at least five words and have ended by itself.
    """
    num_words = len(text.split())
    is_whole = not truncated and num_words >= 5 and text.rstrip().endswith((".", "!", "?"))
    return 10 / (10 + num_words) if is_whole else 0.0


def passes(check: str, text: str) -> bool:
    """Return True if a text passes a check such as `sentence`, `words:12` or `use:bright`."""
    name, _, value = check.partition(":")
    words = re.findall(r"[a-z']+", text.lower())
    match name:
        case "sentence":
            return len(words) >= 4 and re.fullmatch(r"[^.!?\n]+[.!?]", text) is not None
        case "words":
            return len(words) <= int(value)
        case "use":
            return value in words
        case "avoid":
            return value not in words
        case "end":
            return text.endswith(value)
        case "lowercase":
            return text == text.lower()
        case "capitals":
            return text == text.upper()
        case "items":
            return _is_list(text, int(value))
        case "keys":
            return _has_keys(text, value.split())

    raise ValueError(f"unknown check {check!r}")


def _is_list(text: str, number: int) -> bool:
    """Return True for so many different items of one or two words, separated by commas."""
    items = [item.strip().lower() for item in text.removesuffix(".").split(",")]
    return len(items) == len(set(items)) == number and all(
        re.fullmatch(r"[a-z'-]{2,}( [a-z'-]{2,})?", item) for item in items
    )


def _has_keys(text: str, keys: list[str]) -> bool:
    """Return True for a JSON object with exactly these keys, and texts or numbers as values."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    if not isinstance(found, dict) or found.keys() != set(keys):
        return False
    return all(isinstance(value, str | int | float) and value != "" for value in found.values())
