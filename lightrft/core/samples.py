"""Prompts, completions of engines, and samples, for processes that do not need torch."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, NamedTuple, Self, cast

RIGHT = 0.5
"""A sample solves the prompt when the reward is above this threshold."""


class TokenIds(array):
    """Token ids in 4 bytes each, where a list takes up to 40.

    It compares equal to lists; sums and slices are lists.

        TokenIds([50, 55]) + [43] == [50, 55, 43]
    """

    __slots__ = ()

    def __new__(cls, token_ids: Iterable[int]) -> Self:
        return cast(Self, super().__new__(cls, "i", token_ids))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | array) else NotImplemented

    def __add__(self, other: Iterable[int]) -> list[int]:
        return [*self, *other]

    def __radd__(self, other: Iterable[int]) -> list[int]:
        return [*other, *self]

    def __getitem__(self, index: Any) -> Any:
        return self.tolist()[index] if isinstance(index, slice) else super().__getitem__(index)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self)

    def __repr__(self) -> str:
        return repr(self.tolist())


class Answer(NamedTuple):
    """Tokens of a conversation from the first learned token on.

    Answer(token_ids=[52, 258, 60, 50, 62, 53, 258], learned=[True, True, False, False, False,
    True, True])
    """

    token_ids: Sequence[int]
    learned: list[bool]


@dataclass(slots=True)
class Prompt:
    """Row of the prompt data, ready for an engine.

    Prompt(index=7, text="27+58=", token_ids=[50, 55, 43, 53, 56, 61], columns={"label": "580"})
    """

    index: int
    """Row in the data set; everything derived from the prompt keeps it."""
    text: str
    token_ids: TokenIds
    """Token ids of the text; any sequence of ids is converted."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Other columns of the row; the reward functions of a run receive them by name."""
    multi_modal: dict[str, Any] = field(default_factory=dict)
    """Images, videos and audio of the prompt; empty for text."""
    media_tokens: int = 0
    """Number of additional tokens when images replace the placeholders."""
    location: str = field(default="", compare=False)
    """Location of the row in the data, `train.jsonl:12`, for messages.

    It is empty for prompts that are not from data.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, TokenIds):
            self.token_ids = TokenIds(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the model reads."""
        return len(self.token_ids) + self.media_tokens


@dataclass(frozen=True, slots=True)
class Expanded:
    """Prompt with expanded images, as the model reads it."""

    token_ids: list[int]
    """Token ids, where the tokens of an image and its delimiters replace each placeholder."""
    features: Any
    """Images in the form that the model or engine takes."""
    tower_tokens: int = 0
    """Cost of the model's towers for the images, in text tokens."""


Expand = Callable[[Prompt], Expanded]
"""Function that expands a prompt for the trained model; the features are tensors by name."""


class Drafts(NamedTuple):
    """Drafts of a response that the model has verified.

    Drafts(count=2, num_tokens=10, num_accepted=3)
    """

    count: int = 0
    """Number of verifications, each of one draft."""
    num_tokens: int = 0
    """Number of drafted tokens."""
    num_accepted: int = 0
    """Number of drafted tokens that became part of the response."""

    def plus(self, other: "Drafts") -> "Drafts":
        return Drafts(*map(add, self, other))


@dataclass(slots=True)
class Completion:
    """Result of an engine for one sample; it has the new tokens only.

    Completion(token_ids=[53, 56, 257], logprobs=[-.1, -.2, -.01], finish_reason="stop",
    weight_versions=[4, 4, 5])
    """

    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each sampled token, at the sampling temperature."""
    finish_reason: str
    """One of "stop", "length" and "abort"."""
    num_cached_tokens: int = 0
    drafts: Drafts = Drafts()
    weight_versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token."""
    experts: Any = field(default=None, compare=False)
    """Experts that the routers chose, an array [tokens, layers, k] of ids, with --router_replay.

    It begins with the prompt, and the last sampled token has none. Layers without experts have any
    ids."""

    @property
    def weight_version(self) -> int:
        """Return the version of the weights that sampled the first token; 0 without tokens."""
        return self.weight_versions[0] if self.weight_versions else 0


@dataclass(slots=True)
class Episode:
    """Turns of a response, and the observations between them.

    A response of three tokens: a turn of one token, an observation of one token, and a turn that
    gets a reward of 0.5:

        Episode(sampled=[True, False, True], rewards=[(2, 0.5)], finish_reason="stop", num_turns=2,
                messages=[{"role": "assistant", "content": "5"},
                          {"role": "tool", "content": "8"},
                          {"role": "assistant", "content": "0"}])
    """

    sampled: list[bool] = field(default_factory=list)
    """For each token of the response, True if the model sampled it, False in observations."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Turns and observations, as messages of a chat."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """Index of the last token of a turn, and a reward of the environment for it."""
    finish_reason: str = ""
    """Reason why the latest turn ended."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Number of tool calls that were answered with an error."""
    tool_seconds: float = 0.0
    problem: str = ""
    """Reason why the episode failed; empty if it did not."""
    num_turns: int = 0
    """Number of turns that the model sampled here."""
    role: str = "policy"
    """Role that the model has in this conversation."""
    role_rewards: dict[str, float] = field(default_factory=dict)
    """Role -> the environment's reward for it, if it rewards roles separately."""
    overridden: dict[str, int] = field(default_factory=dict)
    """Sampling parameter of an agent's requests -> how often the run's was used instead."""
    branches: list["Sample"] = field(default_factory=list)
    """Other conversations; tokens that they share with an earlier one are learned there."""
    drift: int = 0
    """Number of tokens that are not learned as they were sampled: 0 unless there is a bug."""


@dataclass(slots=True)
class Sample:
    """Response to a prompt. Samples with the same `group` answer the same prompt in the same step.

    Sample(prompt=prompt, group=3, token_ids=[53, 56, 48, 257], logprobs=[-.1, -.2, -.4, -.01],
           text="580", finish_reason="stop", reward=1.0)
    """

    prompt: Prompt
    group: int
    token_ids: list[int]
    logprobs: list[float]
    text: str
    """Response decoded without special tokens, as rewards receive it; never with the prompt."""
    finish_reason: str | None
    """stop or length; None while the response is generated."""
    weight_versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token.

    There are several if the response grew over several steps or while weights came.
    """
    experts: Any = field(default=None, compare=False)
    """Experts that the engine chose for the first tokens of prompt and response: see Completion."""
    drafts: Drafts = Drafts()
    """Drafts of the response since this process began it; empty without --speculative."""
    reward: float = 0.0
    """Reward of the whole response; the sum of step rewards if there are any."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """Terms of the reward by name, if the reward function returns them; for metrics."""
    masked: bool = False
    """True if the sample is excluded from the loss; the reward still counts for the group."""
    greedy_reward: float = 0.0
    """Reward of the greedy response to the same prompt, for estimators that use it as a baseline.
    """
    token_rewards: list[float | None] | None = None
    """Reward at each token of the response, None for tokens without one.

    If unset, the whole reward is at the end.
    """
    episode: Episode | None = None
    """Turns of the response, if it has several. The text is then the last turn's."""

    def extend(self, completion: Completion) -> None:
        """Append what an engine has sampled."""
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.weight_versions += completion.weight_versions
        self.drafts = self.drafts.plus(completion.drafts)
        if completion.experts is not None:
            import numpy as np  # worker processes do without it

            # Tokens that had a record keep the experts that their log-probs come from.
            before = completion.experts[:0] if self.experts is None else self.experts
            self.experts = np.concatenate([before, completion.experts[len(before) :]])

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def rows(self) -> list["Sample"]:
        """Return what is learned from: the sample, and the branches of the episode."""
        return [self, *self.episode.branches] if self.episode else [self]

    @property
    def steps(self) -> list[tuple[int, float]]:
        """Return (index of the response token, reward) for each reward.

        The index is -1 for a response without tokens.
        """
        if self.token_rewards is None:
            return [(len(self.token_ids) - 1, self.reward)]
        return [
            (token, reward) for token, reward in enumerate(self.token_rewards) if reward is not None
        ]

    @property
    def length(self) -> int:
        """Return the number of tokens of prompt and response together."""
        return self.prompt.num_tokens + len(self.token_ids)
