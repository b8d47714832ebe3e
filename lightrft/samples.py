"""Prompts, what an engine makes of them, and samples: plain Python, for processes that have no use for torch."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self


class TokenIds(array):
    """Token ids in 4 bytes each, where a list takes up to 40. It compares with lists, and added to one or cut it makes one.

        TokenIds([50, 55]) + [43] == [50, 55, 43]
    """

    __slots__ = ()

    def __new__(cls, token_ids: Iterable[int]) -> Self:
        return super().__new__(cls, "i", token_ids)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | array) else NotImplemented

    def __add__(self, other: Iterable[int]) -> list[int]:
        return [*self, *other]

    def __radd__(self, other: Iterable[int]) -> list[int]:
        return [*other, *self]

    def __getitem__(self, place: Any) -> Any:
        return self.tolist()[place] if isinstance(place, slice) else super().__getitem__(place)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self)

    def __repr__(self) -> str:
        return repr(self.tolist())


@dataclass(slots=True)
class Prompt:
    """One row of the prompt data, ready for an engine.

        Prompt(index=7, text="27+58=", token_ids=[50, 55, 43, 53, 56, 61], columns={"label": "580"})
    """

    index: int
    """Row in the data set; it travels with everything made from the prompt."""
    text: str
    token_ids: TokenIds
    """Made of any sequence of ids."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The other columns of the row; rewards receive them by name."""
    multi_modal: dict[str, Any] = field(default_factory=dict)
    """Images, videos, audio of the prompt; empty for text."""
    media_tokens: int = 0
    """How many more tokens the model reads, where images stand for their placeholders."""

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, TokenIds):
            self.token_ids = TokenIds(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """What the model reads."""
        return len(self.token_ids) + self.media_tokens


@dataclass(frozen=True, slots=True)
class Expanded:
    """A prompt as its model reads it."""

    token_ids: list[int]
    """Every placeholder replaced by as many tokens as its image has, and those that frame it."""
    features: Any
    """The images, in whatever form they are taken."""


Expand = Callable[[Prompt], Expanded]
"""How the model that learns reads a prompt; its features are tensors by name."""


@dataclass(slots=True)
class Completion:
    """What an engine returns for one sample: the new tokens only."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each sampled token, at the sampling temperature."""
    finish_reason: str
    """stop, length or abort."""
    weight_version: int = 0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class Sample:
    """One response to a prompt. Samples with the same `group` answer the same prompt in the same step.

        Sample(prompt=prompt, group=7, token_ids=[53, 56, 48, 257], logprobs=[-.1, -.2, -.4, -.01],
               text="580", finish_reason="stop", reward=1.0)
    """

    prompt: Prompt
    group: int
    token_ids: list[int]
    logprobs: list[float]
    text: str
    """The response decoded without special tokens: what rewards judge. The prompt is never part of it."""
    finish_reason: str
    weight_version: int = 0
    """Of the engine's weights that drew the first token; a response that grew over several steps has newer ones behind it."""
    reward: float = 0.0
    """Of the whole response; the sum where it was rewarded step by step."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """What the reward is the sum of, where its function says so; for metrics."""
    masked: bool = False
    """True if nothing is learned from it; its reward counts for its group."""
    greedy_reward: float = 0.0
    """Of the greedy response to the same prompt, where an estimator compares with it."""
    token_rewards: list[float | None] | None = None
    """For each token of the response the reward that came with it, None where none did; unset: all of it came at the end."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def steps(self) -> list[tuple[int, float]]:
        """The token of the response at which each reward came, and the reward; -1 for a response without tokens."""
        if self.token_rewards is None:
            return [(len(self.token_ids) - 1, self.reward)]
        return [(token, reward) for token, reward in enumerate(self.token_rewards) if reward is not None]

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return self.prompt.num_tokens + len(self.token_ids)
