"""Reward functions: `f(samples, **columns) -> list[float]`, one number for each sample.

    def short_and_right(samples, label, **columns):
        return [float(s.text == right) - 0.01 * len(s.token_ids) for s, right in zip(samples, label)]

A function is called once for each prompt, as soon as the last of its samples is complete, while others are still generated; it
may be `async`. Each column of the data set is passed as a list, aligned with the samples; `label` is the column of --label_key.
For a response that is rewarded step by step it returns a list instead of a number: a number for each of its tokens, or None for
a token without a reward. A reward with parts is a dictionary of numbers: the reward is their sum, and each part is a metric.
Functions with the signature of TRL, OpenRLHF or verl are called as those libraries call them (conventions.py).

Functions run in worker processes (worker.py), so this module imports neither torch nor an engine.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from lightrft.registry import Registry
from lightrft.samples import Sample

Reward = Callable[..., list[float | list[float | None] | dict[str, float]]]
rewards = Registry("reward", flag="--reward")

FAST_REWARDS = frozenset({"exact_match", "gsm8k", "none"})
"""Functions that take microseconds: a call of another process would take longer."""
NUMBER = r"(?:(?<![\w)])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
"""Pattern of 1,234.5 and -3 and .5; the dash of 10-3 is no sign, and the commas of 1,2,3 do not join. U+2212 is a minus sign."""
FRACTION = rf"(?<![\d/])({NUMBER})/(\d*[1-9]\d*)(?![\d/]|[.,]\d)|({NUMBER})"
"""Pattern of 1/2, or of a number alone: 1/2/2024 is a date."""


@rewards.register("exact_match")
def exact_match(samples: list[Sample], label: list[str], **_: Any) -> list[float]:
    """Return 1 if the response ended by itself and equals the label, else 0."""
    return [float(not sample.truncated and sample.text == str(right)) for sample, right in zip(samples, label, strict=True)]


@rewards.register("gsm8k")
def gsm8k(samples: list[Sample], label: list[str], **_: Any) -> list[float]:
    """Return 1 if the last number of the response equals that of the label, else 0, also if there is no number."""
    pairs = [(_last_number(sample.text), _last_number(str(right))) for sample, right in zip(samples, label, strict=True)]
    return [float(answer is not None and answer == right) for answer, right in pairs]


@rewards.register("none")
def none(samples: list[Sample], **_: Any) -> list[float]:
    """Return 0 for every sample; for runs that learn from a teacher or from reward models only."""
    return [0.0] * len(samples)


def _last_number(text: str) -> Fraction | None:
    """Return the exact value of the last number of the text, or None if there is none."""
    numbers = re.findall(FRACTION, text)
    if not numbers:
        return None
    numerator, denominator, number = (part.replace(",", "").replace("\u2212", "-") for part in numbers[-1])
    return Fraction(Decimal(numerator)) / Fraction(Decimal(denominator)) if denominator else Fraction(Decimal(number))
