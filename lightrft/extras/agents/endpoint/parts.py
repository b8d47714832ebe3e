"""The parts of a turn, which each protocol says in its own form, whole or as they grow."""

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from lightrft.extras.agents.history import good_calls, split_thoughts
from lightrft.extras.agents.messages import Message, Turn

Body = dict[str, Any]
Stored = dict[str, list[Message]]
"""Id of a response -> the messages up to it."""
Kind = Literal["thoughts", "text", "call"]


class Part(NamedTuple):
    """Part of a turn: the thoughts, the text, or a call of a tool."""

    kind: Kind
    text: str
    """What it says so far. A call has its arguments, as JSON."""
    name: str = ""
    id: str = ""
    """Name of the tool that is called, and what names the call to clients."""


class Piece(NamedTuple):
    """What a part has gained since the turn was last seen."""

    number: int
    """Number of the part in the turn, from 0."""
    part: Part
    text: str
    begins: bool
    ends: bool


class Growth(NamedTuple):
    """A turn that has grown, or is complete: then it has a finish reason."""

    turn: Turn
    reply: Body
    """The reply of the protocol, as if the turn ended here."""
    pieces: list[Piece]


def parts_of(turn: Turn, body: Body, *, apart: bool) -> list[Part]:
    """Return the parts of a turn that answers a chat completion.

    The thoughts are `apart`, or in the text. There are calls if the request has tools. The parts of
    a turn that grows only become longer and more.
    """
    calls = good_calls(turn) if body.get("tools") and body.get("tool_choice") != "none" else []
    grows = not turn.finish_reason
    text = turn.content if calls or grows else turn.text
    thoughts, text = split_thoughts(turn.opened + text) if apart else ("", text)
    parts = [Part("thoughts", thoughts)] if thoughts else []
    if text.strip() or not (calls or grows):
        parts.append(Part("text", text))
    for index, call in enumerate(calls):
        written = json.dumps(call.arguments)
        parts.append(Part("call", written, call.name, f"call_{turn.id}_{index}"))
    return parts


def pieces_of(before: list[Part], parts: list[Part], *, complete: bool) -> Iterator[Piece]:
    """Yield what has been added to the parts of a turn."""
    for index in range(max(len(before) - 1, 0), len(parts)):
        part = parts[index]
        begins = index >= len(before)
        text = part.text if begins else part.text[len(before[index].text) :]
        ends = complete or index < len(parts) - 1
        if begins or text or ends:
            yield Piece(index, part, text, begins, ends)
