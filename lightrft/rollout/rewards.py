"""Rewards: plain functions `f(samples, **columns) -> list[float]`, one number per sample.

    def short_and_right(samples, label, **columns):
        return [float(s.text == right) - 0.01 * len(s.token_ids) for s, right in zip(samples, label)]

A function with the signature of one of TRL, OpenRLHF or verl is called as they do (reward_conventions.py).
A function is called once for each prompt, as soon as the last of its samples is complete, while those of others still grow. Each
column of the data set arrives as a list, aligned with the samples; `label` is the column of --label_key. A response that is
rewarded step by step has a list instead of a number: for each of its tokens a number, or None where nothing is to be said. A
reward of parts is a dictionary of numbers: their sum counts, and each is a metric. What is random in a reward takes a generator
of its own: an engine may be drawing from the global ones.
"""

import math
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Set
from decimal import Decimal
from fractions import Fraction
from itertools import dropwhile
from pathlib import Path
from typing import Any

from lightrft.config import ConfigError, RewardSection
from lightrft.parallel.collectives import Axis
from lightrft.registry import Registry
from lightrft.rollout import reward_conventions
from lightrft.rollout.model_rewards import ModelRewards
from lightrft.rollout.reward_calls import RewardCalls
from lightrft.rollout.reward_conventions import RewardFunction
from lightrft.types import Prompt, Sample

Reward = Callable[..., list[float | list[float | None] | dict[str, float]]]
rewards = Registry("reward", flag="--reward")

NUMBER = r"(?:(?<![\w)])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
"""1,234.5 and -3 and .5; the dash of 10-3 is no sign, and the commas of 1,2,3 do not join. U+2212 is a minus sign, too."""
FRACTION = rf"(?<![\d/])({NUMBER})/(\d*[1-9]\d*)(?![\d/]|[.,]\d)|({NUMBER})"
"""1/2, or a number alone: 1/2/2024 is a date."""
LARGEST = 1e18
"""Of a reward: its squares, as of a group's deviation, have to fit into float32."""


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

    def __init__(
        self, name: str, siblings: Axis | None = None, *, background: bool = True, minutes: float = RewardSection.reward_minutes,
        server_minutes: float = RewardSection.server_minutes, chat: bool = False, fail: Callable[..., Any] | None = None,
    ):  # fmt: skip
        """`siblings`: ranks that hold the same samples. The first of them judges for all; a judge need not repeat itself.

        In the `background` it is asked by a thread while other samples still grow, else by the main thread in finish().
        A call takes at most so many `minutes`, and a server may be away for `server_minutes`. `chat`: prompts are chats.
        `fail` ends all ranks: StrategyBase.fail().
        """
        self.name, self.siblings = name, siblings or Axis("siblings", 1, 0, None)
        on_server = name.startswith(("http://", "https://"))
        function = _on_server(name, 60 * minutes, 60 * server_minutes) if on_server else rewards[name]
        self.function = RewardFunction(function, chat=chat)
        self.models: ModelRewards | None = None
        """Reward models that judge beside the function, when the engine sleeps: the device has room for one at a time."""
        limit = None if on_server else 60 * minutes  # a server has the same limit, and says more when it comes
        self._calls = RewardCalls(f"--reward {name}", self._judge, background=background, limit=limit, fail=fail)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """ConfigError where the function cannot be called with the columns of these prompts."""
        try:
            self.function.check(prompts)
        except ConfigError as error:
            raise ConfigError(f"--reward {self.name}: {error}") from error

    def row_problem(self, prompt: Prompt) -> str | None:
        """Return why responses to this prompt could not be judged: a column that the function requires is absent, or null."""
        problem = self.function.row_problem(prompt.columns)
        return f"--reward {self.name}: {problem}" if problem else None

    def __call__(self, samples: list[Sample]) -> None:
        """Set `reward` of every sample. ConfigError, on all siblings, for a reward that fails or is no number."""
        self.begin(samples)
        self.finish(samples)

    def begin(self, samples: list[Sample]) -> None:
        """Have these judged, in one call of the function; it is called for one thing after another."""
        if self.siblings.rank == 0:
            self._calls.begin(samples)

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
        try:
            self._calls.wait()
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
            message = f"{type(error).__name__}: {error}{_place(error)}. The data has the columns {has}"
            raise ConfigError(f"--reward {self.name}: {message}") from error
        if _length(values) != len(samples):
            hint = "; parts of a reward are a dictionary for each sample" if isinstance(values, Mapping) else ""
            problem = f"{values!r:.200} is not a list of {len(samples)} rewards, one per sample{hint}"
            raise ConfigError(f"--reward {self.name}: {problem}")
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
        self._number(sample.reward, sample)  # a sum may be out of range

    def _per_token(self, values: list[float | None], sample: Sample) -> list[float | None]:
        if len(values) != len(sample.token_ids) or all(value is None for value in values):
            raise ConfigError(
                f"--reward {self.name}: {values!r:.200} is not a list of {len(sample.token_ids)} numbers or None, one for each "
                f"token, and at least one number, for the response {sample.text!r:.200}"
            )
        return [None if value is None else self._number(value, sample) for value in values]

    def _number(self, value: Any, sample: Sample) -> float:
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is of a tensor with several elements
            number = math.nan
        if math.isfinite(number) and abs(number) <= LARGEST:
            return number
        problem = f"is beyond {LARGEST:g}" if math.isfinite(number) else "is not a finite number"
        raise ConfigError(
            f"--reward {self.name}: {value!r:.200} {problem}, for the response {sample.text!r:.200} to the prompt "
            f"{sample.prompt.text!r:.200}"
        )


def _place(error: Exception) -> str:
    """The last line of the user's file that the error went through; none where the function was not entered or is built in."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    frames = list(dropwhile(lambda one: one.filename == reward_conventions.__file__, frames))
    own = [one for one in frames if one.filename == frames[0].filename and Path(one.filename).parent != Path(__file__).parent]
    return f", at {own[-1].filename}:{own[-1].lineno} ({own[-1].name})" if own else ""


def _length(values: Any) -> int | None:
    """None for what is no list: the keys of a dictionary, the characters of a text and a set are no rewards."""
    if isinstance(values, str | bytes | Mapping | Set):
        return None
    try:
        return len(values)
    except TypeError:
        return None


def _on_server(url: str, seconds: float, patience: float) -> Reward:
    try:
        from lightrft.rollout.remote_reward import RemoteReward
    except ModuleNotFoundError as error:
        raise ValueError(f"--reward {url} needs {error.name}: pip install httpx tenacity") from error
    return RemoteReward(url, seconds=seconds, patience=patience)


def _last_number(text: str) -> Fraction | None:
    """The exact value of the last number."""
    numbers = re.findall(FRACTION, text)
    if not numbers:
        return None
    numerator, denominator, number = (part.replace(",", "").replace("\u2212", "-") for part in numbers[-1])
    return Fraction(Decimal(numerator)) / Fraction(Decimal(denominator)) if denominator else Fraction(Decimal(number))
