"""Messages between the program of an episode and the rank that generates the turns.

They are plain Python. A program sends JSON, and the rank checks the form. The rank sends pickled
objects that the program believes.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lightrft.algorithms.rollout.episode_roles import POLICY, ROLE_MARK
from lightrft.config.values import COLDEST, check_text

Message = dict[str, Any]
"""Message of a chat, such as {"role": "tool", "content": "56"}."""
Observation = str | list[Message] | list[int] | None
"""What the model reads before a turn: a text, messages of a chat, or token ids.

None: nothing but the prompt.
"""
COUNTED = "counted"
"""Finish reason of the reply to a request that only counts the tokens before a turn."""
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
    """Why the call cannot be read; the name and the arguments are then empty."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of the model, as it was sampled.

    It has no tokens if there is no room for it, or no turn left.
    """

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
    stopped: str = ""
    """Text of the request that has ended the turn. The text and the content are without it."""
    number: int = 0
    """Number of the turn in the episode, from 0."""
    id: str = ""
    """What names the turn to clients."""
    opened: str = ""
    """Mark of the thinking that the tokens before the turn have begun."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Request of a program for the model's next turn."""

    observation: Observation
    after: int | None = None
    """Number of the turn that it follows, from 0.

    BEGINNING starts a separate conversation, with the observation as the whole prompt. None: the
    latest turn, or at first the prompt of the row.
    """
    plain: bool = False
    """True if a text is read as it is, without the chat template."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Schemas of tools, in addition to the run's."""
    max_tokens: int | None = None
    """Largest number of tokens of the turn; None: what the run's limits leave."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Sampling parameters that replace the run's; for a model that does not learn."""
    counts: bool = False
    """True if no turn is sampled: the reply has the tokens that would come before it."""
    stop: list[str] = field(default_factory=list)
    """Texts that end the turn, in addition to the run's."""
    role: str = POLICY
    """Role that the model has. A turn of another role is continued by a separate conversation."""
    number: int = 0
    """Number of the request, which the reply repeats: several can wait at the same time."""


BEGINNING = -1


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer to a request that cannot be rendered."""

    problem: str


@dataclass(slots=True)
class Ended:
    """A program's report that its episode has ended."""

    rewards: list[tuple[int, float]] = field(default_factory=list)
    """Number of a turn, from 0, and a reward for it."""
    role_rewards: dict[str, float] = field(default_factory=Counter)
    """Role -> reward, if roles are rewarded separately."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Number of calls that were answered with an error."""
    tool_seconds: float = 0.0
    problem: str = ""
    """Why the episode failed; empty if it ended well."""
    calls_running: bool = False
    """True if a function of the episode still runs: no other episode should share the process."""
    overridden: Counter[str] = field(default_factory=Counter)
    """Sampling parameter of a client with its value -> how often the run's was used instead."""
    num_replies: int = 0
    """Number of replies that it has read.

    An unread one would be read by the next episode in the same process.
    """


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A request to the server of an episode and the reply, for --agent_record."""

    path: str
    request: str
    status: int
    reply: str
    """The body; of a stream, the text of all events."""
    turn: int | None = None
    """Number of the turn that was sampled."""


# -- on the wire


RANGES = {"temperature": (0, 100), "top_p": (1e-6, 1), "top_k": (-1, 1_000_000), "min_p": (0, 1)}
"""Sampling parameters that a request can choose, with the least and the largest value."""
WHOLE_NUMBERS = ("top_k",)
"""Sampling parameters that are whole numbers."""
MOST_STOPS = 16
"""Most texts of a request that end a turn."""


def check_sampling(sampling: dict[str, Any]) -> None:
    """Raise ValueError for sampling parameters of a request that are not numbers in range."""
    for name, value in sampling.items():
        if name not in RANGES:
            raise ValueError(f"{name} is no parameter that a request can choose")
        least, most = RANGES[name]
        kind, word = (int, "whole number") if name in WHOLE_NUMBERS else (int | float, "number")
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
            raise ValueError(f"{name} is a {word} from {least:g} to {most:g}, not {value!r:.100}")

    if 0 < sampling.get("temperature", 0) < COLDEST:
        raise ValueError(
            f"temperature is 0, or at least {COLDEST:g}, not {sampling['temperature']!r}"
        )


def check_stop(stop: Any) -> None:
    """Raise ValueError for texts that end a turn if they are not at most MOST_STOPS texts."""
    texts = isinstance(stop, list) and all(isinstance(text, str) and text for text in stop)
    if not texts or len(stop) > MOST_STOPS:
        raise ValueError(f"stop is up to {MOST_STOPS} texts that are not empty, not {stop!r:.100}")


def check_request(request: TurnRequest, num_turns: int) -> None:
    """Raise ValueError for a request that cannot follow so many turns, or makes no sense."""
    observation = request.observation
    after = request.after
    limit = request.max_tokens
    items = observation if isinstance(observation, list) else []

    token_ids = all(type(each) is int for each in items)
    messages = all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in items)
    if not (observation is None or isinstance(observation, str | list) and (token_ids or messages)):
        raise ValueError(
            f"an observation is a text, messages or token ids, not {observation!r:.100}"
        )

    if isinstance(observation, str):
        check_text(observation)
    if not (after is None or type(after) is int and BEGINNING <= after < num_turns):
        raise ValueError(f"there is no turn {after!r:.100} that it could follow")
    if not (limit is None or type(limit) is int and limit >= 1):
        raise ValueError(
            f"the largest number of tokens is a whole number from 1, not {limit!r:.100}"
        )
    if not (
        isinstance(request.tools, list) and all(isinstance(each, dict) for each in request.tools)
    ):
        raise ValueError("tools are a list of schemas")
    check_stop(request.stop)
    if not re.fullmatch(r"[\w-]+", request.role):
        raise ValueError(
            f"the role of the model {ROLE_MARK}{request.role} is a name of letters, digits, _ and -"
        )
    check_sampling(request.sampling)


def to_bytes(message: TurnRequest | Exchanged | Ended) -> bytes:
    """Return a message of a program. Raises ValueError for values that JSON does not know."""
    values = {each.name: getattr(message, each.name) for each in fields(message)}
    try:
        return json.dumps([type(message).__name__, values]).encode()
    except TypeError as error:
        raise ValueError(f"an observation is text, in plain Python: {error}") from error


def from_bytes(content: bytes) -> TurnRequest | Exchanged | Ended:
    """Return a message of a program. Raises ValueError for anything else."""
    try:
        name, values = json.loads(content)
        kinds = {kind.__name__: kind for kind in (TurnRequest, Exchanged, Ended)}
        message = kinds[name](**values)
        if isinstance(message, Exchanged):
            texts = str(message.path), str(message.request), int(message.status), str(message.reply)
            return Exchanged(*texts, message.turn)
        if isinstance(message, Ended):
            rewards = [(int(turn), float(reward)) for turn, reward in message.rewards]
            roles = {str(role): float(reward) for role, reward in message.role_rewards.items()}

            numbers = int(message.tool_calls), int(message.tool_errors), float(message.tool_seconds)
            problem = str(message.problem)
            running = bool(message.calls_running)
            replaced = Counter({str(name): int(n) for name, n in message.overridden.items()})
            return Ended(
                rewards, roles, *numbers, problem, running, replaced, int(message.num_replies)
            )
        return message
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
