"""Rewards of the recipes for a laptop: plain functions of the samples of a prompt and of the
columns of its row.

--reward scripts/laptop/rewards.py:follows
"""

import json
import re
from typing import Any


def follows_all(samples: list[Any], checks: list[list[str]], **columns: Any) -> list[float]:
    """Return 1 if a response passes all checks of its row, else 0."""
    return [float(share == 1) for share in _shares_passed(samples, checks)]


def follows(samples: list[Any], checks: list[list[str]], **columns: Any) -> list[float]:
    """Return 1 if a response passes all checks of its row, else half of the share that it passes.

    With follows_all() hardly any group of responses would have a signal at first.
    """
    return [1.0 if share == 1 else share / 2 for share in _shares_passed(samples, checks)]


def brief(samples: list[Any], **columns: Any) -> list[float]:
    """Return the brevity of each response."""
    return [brevity(sample.text, sample.truncated) for sample in samples]


def brevity(text: str, truncated: bool) -> float:
    """Return 10 / (10 + words) for whole sentences of at least five words that ended by themselves,
    else 0.
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
        case "items":
            return _is_list(text, int(value))
        case "keys":
            return _has_keys(text, value.split())
    raise ValueError(f"unknown check {check!r}")


def _shares_passed(samples: list[Any], checks: list[list[str]]) -> list[float]:
    """Return the share of its checks that each response passes; 0 if it did not end by itself."""
    return [
        0.0
        if sample.truncated
        else sum(passes(check, sample.text.strip()) for check in of_row) / len(of_row)
        for sample, of_row in zip(samples, checks, strict=True)
    ]


def _is_list(text: str, number: int) -> bool:
    """Return True for so many different items of one or two words, separated by commas."""
    items = [item.strip().lower() for item in text.removesuffix(".").split(",")]
    return len(items) == len(set(items)) == number and all(
        re.fullmatch(r"[a-z'-]{2,}( [a-z'-]{2,})?", item) for item in items
    )


def _has_keys(text: str, keys: list[str]) -> bool:
    """Return True for a JSON object with exactly these keys, whose values are texts or numbers."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    if not isinstance(found, dict) or found.keys() != set(keys):
        return False
    return all(isinstance(value, str | int | float) and value != "" for value in found.values())
