"""Messages between the program of an episode and the rank that generates its turns, in plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""Message of a chat, such as {"role": "tool", "content": "56"}."""
Observation = str | list[Message] | list[int] | None
"""Observation that the model reads before its turn: a text, messages of a chat, or token ids. None: nothing but the prompt."""
LENGTH = "length"
"""Finish reason of a turn, or of an episode, that reached a limit."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has written.

        ToolCall(name="multiply", arguments={"a": 7, "b": 8})
    """

    name: str
    arguments: dict[str, Any]
    problem: str = ""
    """Reason why the call cannot be read; the name and the arguments are then empty."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of the model, as it was sampled; without tokens if there is no room for it, or no turn left."""

    text: str
    """Text without special tokens."""
    token_ids: list[int]
    finish_reason: str
    """`stop`, or `length` for a turn that was cut."""
    is_last: bool = False
    """True if no turn can follow, because a limit of the episode is reached."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    content: str = ""
    """Text without tool calls."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token."""
    context_ids: Sequence[int] = ()
    """All tokens before the turn."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Request of a program for the model's next turn."""

    observation: Observation
    after: int | None = None
    """Number of the turn that it follows, from 0, and BEGINNING for a conversation of its own, of which the observation is the
    whole prompt. None: the latest turn, or at first the prompt of the row."""
    plain: bool = False
    """True if a text is read as it is, without the chat template."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Schemas of tools, in addition to those of the run."""
    max_tokens: int | None = None
    """Largest number of tokens of the turn; None: what the run's limits leave."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Sampling parameters that replace those of the run; for a model that does not learn."""


BEGINNING = -1


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer to a request that cannot be rendered."""

    problem: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Report of a program that its episode has ended."""

    rewards: list[tuple[int, float]] = field(default_factory=list)
    """Number of a turn, from 0, and a reward for it."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Number of calls that were answered with an error."""
    tool_seconds: float = 0.0
    problem: str = ""
    """Reason why the episode failed; empty if it ended well."""
    calls_running: bool = False
    """True if a function of the episode still runs, so that no other episode should share its process."""
