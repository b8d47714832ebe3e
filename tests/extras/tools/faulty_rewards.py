"""Reward functions with one fault each, in the order of the table in test_reward_tests.py."""

import itertools
import random
import re
import time
from typing import Any

calls = itertools.count()


def last_number(text: str) -> str:
    return (re.findall(r"\d+", text) or [""])[-1]


def right(samples: Any, label: Any, **columns: Any) -> list[float]:
    return [
        float(last_number(one.text) == answer) for one, answer in zip(samples, label, strict=False)
    ]


def noisy(samples: Any, label: Any, **columns: Any) -> list[float]:
    return [reward + random.random() / 100 for reward in right(samples, label)]


def drifts(samples: Any, label: Any, **columns: Any) -> list[float]:
    return [reward + next(calls) / 1e6 for reward in right(samples, label)]


def prefers_the_first(samples: Any, label: Any, **columns: Any) -> list[float]:
    return [reward - index / 10 for index, reward in enumerate(right(samples, label))]


def normalised(samples: Any, label: Any, **columns: Any) -> list[float]:
    rewards = right(samples, label)
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


def edits(samples: Any, label: Any, **columns: Any) -> list[float]:
    rewards = right(samples, label)
    for sample in samples:
        sample.prompt.columns["seen"] = True
    return rewards


def raises(samples: Any, label: Any, **columns: Any) -> list[float]:
    return [
        float(int(re.findall(r"\d+", one.text)[-1]) == int(answer))
        for one, answer in zip(samples, label, strict=False)
    ]


def not_a_number(samples: Any, label: Any, **columns: Any) -> list[float]:
    return [
        float("nan") if len(one.text) > 1000 else reward
        for one, reward in zip(samples, right(samples, label), strict=False)
    ]


def constant(samples: Any, label: Any, **columns: Any) -> list[float]:
    return [0.5] * len(samples)


def inverted(samples: Any, label: Any, **columns: Any) -> list[float]:
    return [
        float(last_number(one.text) not in ("", answer))
        for one, answer in zip(samples, label, strict=False)
    ]


def strict_ending(samples: Any, label: Any, **columns: Any) -> list[float]:
    return [float(one.text.endswith(answer)) for one, answer in zip(samples, label, strict=False)]


def generous_to_nothing(samples: Any, label: Any, **columns: Any) -> list[float]:
    return [
        float(last_number(one.text) in ("", answer))
        for one, answer in zip(samples, label, strict=False)
    ]


def reads_the_prompt(samples: Any, label: Any, **columns: Any) -> list[float]:
    return [
        float(answer in re.findall(r"\d+", one.text))
        for one, answer in zip(samples, label, strict=False)
    ]


def any_answer(samples: Any, label: Any, **columns: Any) -> list[float]:
    return [
        float(any(line.strip() == answer for line in one.text.splitlines()))
        for one, answer in zip(samples, label, strict=False)
    ]


def substring(samples: Any, label: Any, **columns: Any) -> list[float]:
    return [float(answer in one.text) for one, answer in zip(samples, label, strict=False)]


def slow(samples: Any, label: Any, **columns: Any) -> list[float]:
    time.sleep(0.003 * len(samples))
    return right(samples, label)
