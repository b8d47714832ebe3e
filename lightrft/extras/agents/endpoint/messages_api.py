"""Anthropic's Messages API, in terms of a chat completion.

Requests: https://docs.anthropic.com/en/api/messages. Hints such as cache_control are ignored.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from lightrft.config.tables import table
from lightrft.data.rendering.messages import as_messages, as_tools
from lightrft.extras.agents.endpoint.parts import Body, Growth, Part, Stored
from lightrft.extras.agents.endpoint.protocol import PARAMETERS, EndpointModel, event
from lightrft.extras.agents.messages import LENGTH, Turn

MESSAGES_PARAMETERS: list[str] = table(PARAMETERS)["messages"]
"""Parameters that have the same meaning in a chat completion."""
ERROR_TYPES: dict[str, str] = table(PARAMETERS)["messages_errors"]
"""Code of a problem -> the type of the error; of others it is invalid_request_error."""
SIGNATURE = "lightrft"
"""Signature of thoughts: clients drop those without one."""
BLOCK_DELTAS = {
    "thoughts": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""Kind of a part -> type of its deltas, and their text."""
MESSAGES_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def chat_body(body: Body, stored: Stored) -> Body:
    """Return the chat completion that a request asks for.

    Raises ValueError for what has no counterpart there.
    """
    messages = body.get("messages")
    if system := body.get("system"):
        if isinstance(system, list):
            system = [block for block in system if not _is_billing(block)]
        messages = [{"role": "system", "content": system}, *(messages or ())]
    choice = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, dict) or "type" not in choice:
        raise ValueError(f"tool_choice is an object with a type, not {choice!r:.100}")

    return {name: body[name] for name in MESSAGES_PARAMETERS if name in body} | {
        "messages": as_messages(messages) or messages,
        "tools": as_tools([*map(_tool_of_client, body.get("tools") or ())], written=True),
        "tool_choice": choice["type"],
        "stop": body.get("stop_sequences"),
        "kept": None,
    }


def _is_billing(block: Any) -> bool:
    """Return whether a block is a header of Claude Code, with another number in each request."""
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header:")


def _tool_of_client(tool: Any) -> Body:
    """Return a tool without hints. Raises ValueError for one that a provider runs."""
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise ValueError(f"a tool is one that the client runs, not {tool!r:.100}")
    return {name: tool[name] for name in ("name", "description", "input_schema") if name in tool}


def reply(turn: Turn, parts: list[Part], served: EndpointModel, chat: Body) -> Body:
    """Return the reply to a request for a chat completion."""
    called = any(part.kind == "call" for part in parts)
    reason = "tool_use" if called else "stop_sequence" if turn.stopped else "end_turn"
    message = {
        "id": f"msg_{turn.id}",
        "type": "message",
        "role": "assistant",
        "model": served.name,
        "content": [_block(part, part.text) for part in parts],
        "stop_reason": "max_tokens" if turn.finish_reason == LENGTH else reason,
        "stop_sequence": turn.stopped or None,
        "usage": {"input_tokens": len(turn.context_ids), "output_tokens": len(turn.token_ids)},
    }
    Message.model_validate(message)
    return message


def _block(part: Part, text: str) -> Body:
    """Return a part with this text."""
    if part.kind == "thoughts":
        return {"type": "thinking", "thinking": text, "signature": SIGNATURE if text else ""}
    if part.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": json.loads(text or "{}")}


async def events(growth: AsyncIterator[Growth], body: Body) -> AsyncIterator[str]:
    """Yield the server-sent events of a turn."""
    begun = False
    async for turn, message, pieces in growth:
        usage = {"output_tokens": message["usage"]["output_tokens"]}
        if not begun:
            before = {"content": [], "stop_reason": None, "stop_sequence": None}
            before["usage"] = message["usage"] | {"output_tokens": 0}
            yield _event("message_start", message=message | before)
        begun = True

        for index, part, text, begins, ends in pieces:
            kind, name = BLOCK_DELTAS[part.kind]
            if begins:
                yield _event("content_block_start", index=index, content_block=_block(part, ""))
            deltas = [{"type": kind, name: text}] if text else []
            if ends and part.kind == "thoughts":
                deltas.append({"type": "signature_delta", "signature": SIGNATURE})
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            if ends:
                yield _event("content_block_stop", index=index)

        if turn.finish_reason:
            ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
            yield _event("message_delta", delta=ended, usage=usage)
            yield _event("message_stop")


def _event(kind: str, **content: Any) -> str:
    content["type"] = kind
    MESSAGES_EVENT.validate_python(content)
    return f"event: {kind}\n{event(content)}"


def problem(message: str, code: str = "invalid_request") -> Body:
    kind = ERROR_TYPES.get(code, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
