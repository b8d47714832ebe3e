"""Anthropic's Messages API, in terms of a chat completion.

Requests: https://docs.anthropic.com/en/api/messages. Hints such as cache_control are ignored.
"""

import json
from collections.abc import Iterator
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from lightrft.data.rendering.messages import as_messages, as_tools
from lightrft.extras.agents.endpoint.protocol import Body, EndpointModel, event, written_calls
from lightrft.extras.agents.history import split_thoughts
from lightrft.extras.agents.messages import LENGTH, Turn

MESSAGES_PARAMETERS = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
"""Parameters that have the same meaning in a chat completion."""
ERROR_TYPES = {
    "invalid_api_key": "authentication_error",
    "request_too_large": "request_too_large",
    "request_timeout": "timeout_error",
    "internal_error": "api_error",
}
"""Code of a problem -> the type of the error; of others it is invalid_request_error."""
SIGNATURE = "lightrft"
"""Signature of thoughts: clients drop those without one."""
MESSAGES_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def chat_body(body: Body) -> Body:
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


def reply(turn: Turn, served: EndpointModel, chat: Body) -> Body:
    """Return the reply to a request for a chat completion."""
    calls = written_calls(turn, chat)
    thoughts, text = split_thoughts(turn.content if calls else turn.text)
    content: list[Body] = []
    if thoughts:
        content.append({"type": "thinking", "thinking": thoughts, "signature": SIGNATURE})
    if text.strip() or not calls:
        content.append({"type": "text", "text": text})
    content += [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in calls
    ]

    reason = "tool_use" if calls else "stop_sequence" if turn.stopped else "end_turn"
    message = {
        "id": f"msg_{turn.id}",
        "type": "message",
        "role": "assistant",
        "model": served.name,
        "content": content,
        "stop_reason": "max_tokens" if turn.finish_reason == LENGTH else reason,
        "stop_sequence": turn.stopped or None,
        "usage": {"input_tokens": len(turn.context_ids), "output_tokens": len(turn.token_ids)},
    }
    Message.model_validate(message)
    return message


def events(message: Body, body: Body) -> Iterator[str]:
    """Yield the server-sent events of a reply, each block in one piece."""
    usage = message["usage"]
    before = {"content": [], "stop_reason": None, "stop_sequence": None}
    begun = message | before | {"usage": usage | {"output_tokens": 0}}
    yield _event(type="message_start", message=begun)
    for index, block in enumerate(message["content"]):
        empty, deltas = _pieces(block)
        yield _event(type="content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event(type="content_block_delta", index=index, delta=delta)
        yield _event(type="content_block_stop", index=index)

    ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield _event(type="message_delta", delta=ended, usage={"output_tokens": usage["output_tokens"]})
    yield _event(type="message_stop")


def _pieces(block: Body) -> tuple[Body, list[Body]]:
    """Return a block without its content, and the deltas that bring it."""
    match block["type"]:
        case "text":
            return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
            return block | {"thinking": "", "signature": ""}, deltas
    written = json.dumps(block["input"])
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": written}]


def _event(**content: Any) -> str:
    MESSAGES_EVENT.validate_python(content)
    return f"event: {content['type']}\n{event(content)}"


def problem(message: str, code: str = "invalid_request") -> Body:
    kind = ERROR_TYPES.get(code, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
