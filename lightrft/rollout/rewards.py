"""Rewards: plain functions `f(samples, **columns) -> list[float]`, one number per sample.

    def short_and_right(samples, label, **columns):
        return [float(s.text == right) - 0.01 * len(s.token_ids) for s, right in zip(samples, label)]

A function is called once for each prompt, as soon as the last of its samples is complete, while those of others still grow. Each
column of the data set arrives as a list, aligned with the samples; `label` is the column of --label_key. A response that is
rewarded step by step has a list instead of a number: for each of its tokens a number, or None where nothing is to be said. A
reward of parts is a dictionary of numbers: their sum counts, and each is a metric. What is random in a reward takes a generator
of its own: an engine may be drawing from the global ones.
"""

import math
import re
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightrft.config import ConfigError
from lightrft.parallel.collectives import Axis
from lightrft.registry import Registry
from lightrft.rollout.model_rewards import ModelRewards
from lightrft.types import Sample

Reward = Callable[..., list[float | list[float | None] | dict[str, float]]]
rewards = Registry("reward", flag="--reward")

NUMBER = r"(?:(?<![\w)])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
"""1,234.5 and -3 and .5; the dash of 10-3 is no sign, and the commas of 1,2,3 do not join."""


@rewards.register("exact_match")
def exact_match(samples: list[Sample], label: list[str], **_: Any) -> list[float]:
    """1 where the response ended by itself and is the label, else 0."""
    return [float(not sample.truncated and sample.text == str(right)) for sample, right in zip(samples, label, strict=True)]


@rewards.register("gsm8k")
def gsm8k(samples: list[Sample], label: list[str], **_: Any) -> list[float]:
    """1 where the last number of the response equals the last number of the label, else 0; without a number nothing is right."""
    pairs = [(_last_number(sample.text), _last_number(str(right))) for sample, right in zip(samples, label, strict=True)]
    return [float(answer is not None and answer == right) for answer, right in pairs]


@rewards.register("none")
def none(samples: list[Sample], **_: Any) -> list[float]:
    """0, where nothing is judged: distillation alone."""
    return [0.0] * len(samples)


class Judge:
    """A reward function and the checks on what it returns."""

    def __init__(self, name: str, siblings: Axis | None = None, *, background: bool = True):
        """`siblings`: ranks that hold the same samples. The first of them judges for all; a judge need not repeat itself.

        In the `background` it is asked by a thread while other samples still grow, else by the main thread in finish().
        """
        self.name, self.siblings = name, siblings or Axis("siblings", 1, 0, None)
        self.function: Reward = _on_server(name) if name.startswith(("http://", "https://")) else rewards[name]
        self.models: ModelRewards | None = None
        """Reward models that judge beside the function, when the engine sleeps: the device has room for one at a time."""
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward") if background else None
        self._begun: list[tuple[list[Sample], Future | None]] = []

    def __call__(self, samples: list[Sample]) -> None:
        """Set `reward` of every sample. ConfigError, on all siblings, for a reward that fails or is no number."""
        self.begin(samples)
        self.finish(samples)

    def begin(self, samples: list[Sample]) -> None:
        """Have these judged, in one call of the function; it is called for one thing after another."""
        if self.siblings.rank == 0:
            self._begun.append((samples, self._worker.submit(self._judge, samples) if self._worker else None))

    def finish(self, samples: list[Sample]) -> None:
        """Wait for all that was begun, then ask the reward models. All ranks call it together.

        `samples` are those that were begun; siblings give them in the same order, and all get the rewards.
        """
        failure = self._failure()
        if self.siblings.size > 1:
            given = [(sample.reward, sample.reward_parts, sample.token_rewards) for sample in samples]
            values, message = self.siblings.broadcast((given, failure and str(failure)))
            failure = failure or (message and ConfigError(message))
            for sample, value in zip(samples, values, strict=True):
                sample.reward, sample.reward_parts, sample.token_rewards = value
        if failure:
            raise failure
        if self.models is not None:
            self.models(samples)

    def _failure(self) -> ConfigError | None:
        begun, self._begun = self._begun, []
        try:
            for samples, future in begun:
                self._judge(samples) if future is None else future.result()
        except ConfigError as error:
            return error
        return None

    def _judge(self, samples: list[Sample]) -> None:
        if not samples:
            return
        names = set.intersection(*(set(sample.prompt.columns) for sample in samples))
        columns = {name: [sample.prompt.columns[name] for sample in samples] for name in names}
        try:
            values = self.function(samples, **columns)
        except Exception as error:
            has = ", ".join(sorted(names)) or "none"
            hint = ": --no_reward_background asks it there" if "main thread" in str(error) else ""
            message = f"{type(error).__name__}: {error}{_place(error)}{hint}. The data has the columns {has}"
            raise ConfigError(f"--reward {self.name}: {message}") from error
        if not hasattr(values, "__len__") or len(values) != len(samples):
            raise ConfigError(f"--reward {self.name}: {values!r:.200} is not a list of {len(samples)} rewards, one per sample")
        for sample, value in zip(samples, values, strict=True):
            self._set(sample, value)

    def _set(self, sample: Sample, value: Any) -> None:
        sample.reward_parts, sample.token_rewards = {}, None
        if isinstance(value, list):
            sample.token_rewards = self._per_token(value, sample)
            sample.reward = math.fsum(reward for _, reward in sample.steps)  # the same in any order
        elif isinstance(value, dict):
            sample.reward_parts = {name: self._number(part, sample) for name, part in value.items()}
            sample.reward = math.fsum(sample.reward_parts.values())
        else:
            sample.reward = self._number(value, sample)

    def _per_token(self, values: list[float | None], sample: Sample) -> list[float | None]:
        if len(values) != len(sample.token_ids) or all(value is None for value in values):
            raise ConfigError(
                f"--reward {self.name}: {values!r:.200} is not a list of {len(sample.token_ids)} numbers or None, one for each "
                f"token, and at least one number, for the response {sample.text!r:.200}"
            )
        return [None if value is None else self._number(value, sample) for value in values]

    def _number(self, value: Any, sample: Sample) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"--reward {self.name}: {value!r} is not a finite number, for the response {sample.text!r:.200}")
        return number


def _place(error: Exception) -> str:
    """The last line of the user's file that the error went through; none where the function was not entered or is built in."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [one for one in frames if one.filename == frames[0].filename and Path(one.filename).parent != Path(__file__).parent]
    return f", at {own[-1].filename}:{own[-1].lineno} ({own[-1].name})" if own else ""


def _on_server(url: str) -> Reward:
    try:
        from lightrft.rollout.remote_reward import RemoteReward
    except ModuleNotFoundError as error:
        raise ValueError(f"--reward {url} needs {error.name}: pip install httpx tenacity") from error
    return RemoteReward(url)


def _last_number(text: str) -> float | None:
    numbers = re.findall(NUMBER, text)
    return float(numbers[-1].replace(",", "")) if numbers else None
