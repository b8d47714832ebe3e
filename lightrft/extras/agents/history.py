"""Find the turn that a history continues.

An agent sends the history back as messages, text or token ids.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from lightrft.algorithms.rollout.episode_roles import POLICY
from lightrft.data.rendering import messages as rendering
from lightrft.extras.agents.messages import BEGINNING, Message, ToolCall, Turn

Key = tuple[str, str, str]
"""Role, text and tool calls of a message. Messages with equal keys are the same."""
AROUND_THINKING = re.compile(rf"\s*(?:{'|'.join(map(re.escape, rendering.THINKING_MARKS))})\s*")
"""Mark that begins or ends thinking, with the white space around it."""


class TurnHistory:
    """The turns of an episode by what was before them.

    Nothing in them is rendered or tokenized again.
    """

    def __init__(self) -> None:
        self.roles: list[str] = []
        """Role of each turn."""
        self._chats: list[tuple[str, list[Key]]] = []
        self._texts: list[str] = []
        self._stopped: list[str] = []
        self._token_ids: list[list[int]] = []

    def add(
        self,
        turn: Turn,
        role: str,
        *,
        messages: list[Message] | None = None,
        tools: Any = None,
        text: str | None = None,
    ) -> None:
        """Remember a role's turn that answered messages with tools, a text, or token ids alone."""
        self.roles.append(role)
        self._chats.append(("", []))
        if messages is not None:
            self.set_chat(-1, turn, messages, tools)
        self._texts.append(text + turn.text if text is not None else "")
        self._stopped.append(turn.stopped)
        self._token_ids.append([*turn.context_ids, *turn.token_ids])

    def set_chat(self, number: int, turn: Turn, messages: list[Message], tools: Any) -> None:
        """Remember that a turn, whose last tokens are turn `number`, answered these messages."""
        self._chats[number] = _json(tools), [*map(key, [*messages, reply(turn)])]

    def of_chat(
        self, messages: list[Message], tools: Any = None, role: str = POLICY
    ) -> tuple[int, list[Message]]:
        """Return the number of the turn that the messages continue, and the messages after it.

        The number is BEGINNING if they continue none. Among several turns it is the one with the
        most messages, and the latest of these, first among the role's own. A turn still counts as
        sent back if the text differs only in outer white space, and the calls only in ids and the
        form of the JSON.
        """
        keys = [*map(key, messages)]
        described = _json(tools)
        chats = [
            chat if tools_of_it == described and len(chat) < len(keys) else []
            for tools_of_it, chat in self._chats
        ]

        turn, rest = self._longest(chats, keys, role)
        return turn, messages[len(keys) - len(rest) :]

    def of_text(self, text: str, role: str = POLICY) -> tuple[int, str]:
        """Return the number of the turn that the text continues, and the text after it.

        The number is BEGINNING if it continues none.
        """
        turn, rest = self._longest(self._texts, text, role)
        # Clients put the text behind a turn that has ended it, and the turn's tokens have it too.
        return turn, rest.removeprefix(self._stopped[turn] if turn != BEGINNING else "")

    def of_token_ids(self, token_ids: list[int], role: str = POLICY) -> tuple[int, list[int]]:
        """Return the number of the turn that the tokens continue, and the tokens after it.

        The number is BEGINNING if they continue none.
        """
        return self._longest(self._token_ids, token_ids, role)

    def _longest(self, earlier: Sequence[Any], sent: Any, role: str) -> tuple[int, Any]:
        """Return the turn with the longest beginning of what was sent, and the rest of it.

        A role goes on with its own conversation if it can.
        """
        found = (
            (self.roles[turn] == role, len(beginning), turn)
            for turn, beginning in enumerate(earlier)
            if beginning and sent[: len(beginning)] == beginning
        )
        _, size, turn = max(found, default=(False, 0, BEGINNING))
        return turn, sent[size:]


def reply(turn: Turn) -> Message:
    """Return a turn as a message, with calls as chat templates read them."""
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in good_calls(turn)
    ]
    return {"role": "assistant", "content": turn.content if calls else turn.text} | (
        {"tool_calls": calls} if calls else {}
    )


def good_calls(turn: Turn) -> list[ToolCall]:
    """Return the calls of a turn; none if one of them cannot be read.

    The agent then reads the text instead.
    """
    return [] if any(call.problem for call in turn.tool_calls) else turn.tool_calls


def clean_message(message: Any, where: str = "the message") -> Message:
    """Return a message as chat templates read it.

    Raises ValueError for one that has no role, or content other than text.
    """
    message = rendering.clean_message(message, where)
    if not message["role"]:
        raise ValueError(f"{where} has no role: it is an object with a role and a content")

    content = message["content"] or ""
    if not isinstance(content, str):
        raise ValueError("the content of a message is text: agents have no images and no sound")

    for name in ("name", "tool_call_id", *rendering.THOUGHTS):
        if not isinstance(message.get(name), str | None):
            raise ValueError(f"the {name} of a message is a text, not {message[name]!r:.100}")

    kept = ("role", "name", "tool_call_id", "tool_calls", *rendering.THOUGHTS)
    return {name: message[name] for name in kept if message.get(name)} | {"content": content}


def key(message: Message) -> Key:
    """Return what identifies a cleaned message, wherever its thoughts are."""
    calls: Sequence[Any] = [call["function"] for call in message.get("tool_calls", ())]
    texts = [message[name].strip() for name in (*rendering.THOUGHTS, "content") if name in message]
    return message["role"], AROUND_THINKING.sub("", "".join(texts)), _json(calls)


def split_thoughts(text: str) -> tuple[str, str]:
    """Return the thoughts that a turn begins with, without marks, and the text after them.

    Without a mark that ends them, all of it is thoughts.
    """
    for begin, end in rendering.THINKING.items():
        if text.lstrip().startswith(begin):
            thoughts, _, rest = text.lstrip().removeprefix(begin).partition(end)
            return thoughts.strip(), rest.lstrip()
    return "", text


def _json(value: Any) -> str:
    """Return JSON with 30 in place of 30.0: JavaScript knows no difference."""
    read = json.loads(json.dumps(value or None), parse_float=_number)
    return json.dumps(read, sort_keys=True)


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number
