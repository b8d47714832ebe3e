"""Messages between the program of an episode and the rank that generates its turns, in plain Python."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""Message of a chat, such as {"role": "tool", "content": "56"}."""
Observation = str | list[Message] | list[int] | None
"""What the model reads before its turn: a text, messages of a chat, or token ids. None: nothing but the prompt."""
LENGTH = "length"
"""Finish reason of a turn that reached a limit of the episode: it is the last one."""


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
    """Turn of the model, as it was sampled."""

    text: str
    """Text without special tokens."""
    token_ids: list[int]
    finish_reason: str
    """`stop`, or `length` for the last turn of an episode that reached a limit."""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def is_last(self) -> bool:
        """Return True if the episode has no further turn, because a limit is reached."""
        return self.finish_reason == LENGTH


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Request of a program for the model's next turn."""

    observation: Observation


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
