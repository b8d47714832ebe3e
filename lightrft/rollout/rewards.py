"""Rewards: plain functions `f(samples, **columns) -> list[float]`, one number per sample.

    def short_and_right(samples, label, **columns):
        return [float(s.text == right) - 0.01 * len(s.token_ids) for s, right in zip(samples, label)]

Each column of the data set arrives as a list, aligned with the samples; `label` is the column of --label_key.
"""

import math
import re
from collections.abc import Callable
from typing import Any

from lightrft.registry import Registry
from lightrft.types import Sample

Reward = Callable[..., list[float]]
rewards = Registry("reward", flag="--reward")


@rewards.register("exact_match")
def exact_match(samples: list[Sample], label: list[str], **_: Any) -> list[float]:
    """1 where the response ended by itself and is the label, else 0."""
    return [float(not sample.truncated and sample.text == right) for sample, right in zip(samples, label, strict=True)]


@rewards.register("gsm8k")
def gsm8k(samples: list[Sample], label: list[str], **_: Any) -> list[float]:
    """1 where the last number of the response equals the label as a number, else 0."""
    return [float(_last_number(sample.text) == _last_number(str(right))) for sample, right in zip(samples, label, strict=True)]


class Judge:
    """A reward function and the checks on what it returns."""

    def __init__(self, name: str):
        self.name = name
        self.function: Reward = rewards[name]

    def __call__(self, samples: list[Sample]) -> None:
        """Set `reward` of every sample."""
        if not samples:
            return
        names = set.intersection(*(set(sample.prompt.columns) for sample in samples))
        columns = {name: [sample.prompt.columns[name] for sample in samples] for name in names}
        try:
            values = list(self.function(samples, **columns))
        except TypeError as error:
            raise ValueError(f"--reward {self.name}: {error}. The data has the columns {', '.join(sorted(names)) or 'none'}") from error
        if len(values) != len(samples):
            raise ValueError(f"--reward {self.name}: {len(values)} rewards for {len(samples)} samples")
        for sample, value in zip(samples, values, strict=True):
            sample.reward = float(value)
            if not math.isfinite(sample.reward):
                raise ValueError(f"--reward {self.name}: {value} is not a finite number, for the response {sample.text!r}")


def _last_number(text: str) -> float | None:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None
