"""OpenAI's Responses API, in terms of a chat completion.

Requests: https://platform.openai.com/docs/api-reference/responses. The server keeps the messages of
each response for `previous_response_id`, as long as the episode lasts.
"""

import time
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lightrft.config.tables import table
from lightrft.extras.agents.endpoint.parts import Body, Growth, Part, Stored
from lightrft.extras.agents.endpoint.protocol import PARAMETERS, EndpointModel
from lightrft.extras.agents.endpoint.protocol import event as server_event
from lightrft.extras.agents.history import clean_message
from lightrft.extras.agents.messages import LENGTH, Message, Turn

RESPONSES_PARAMETERS: list[str] = table(PARAMETERS)["responses"]
"""Parameters that have the same meaning in a chat completion."""
ITEM_DELTAS = {
    "thoughts": ("response.reasoning_text", "text"),
    "text": ("response.output_text", "text"),
    "call": ("response.function_call_arguments", "arguments"),
}
"""Kind of a part -> beginning of the names of its events, and its text."""
RESPONSES_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def chat_body(body: Body, stored: Stored) -> Body:
    """Return the chat completion that a request asks for; `stored` has earlier responses' messages.

    Raises ValueError for what has no counterpart there.
    """
    before = []
    if (name := body.get("previous_response_id")) is not None:
        if name not in stored:
            raise ValueError(f"previous_response_id {name!r:.100} is no response of this episode")
        before = stored[name]
    for name in ("background", "conversation", "prompt"):
        if body.get(name):
            raise ValueError(f"{name} is not possible: omit it")

    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not items or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"input is a text or a list of items, not {given!r:.100}")
    # Instructions hold for one response.
    kept = [*before, *map(_message, items)]
    instructions = body.get("instructions")
    begin = [{"role": "system", "content": instructions}] if instructions else []

    return {name: body[name] for name in RESPONSES_PARAMETERS if name in body} | {
        "messages": _joined([*begin, *kept]),
        "kept": kept if body.get("store", True) else None,
        "tools": [_tool(tool) for tool in body.get("tools") or ()],
        "max_tokens": body.get("max_output_tokens"),
        "response_format": (body.get("text") or {}).get("format"),
    }


def _message(item: Body) -> Message:
    """Return an item as a message of a chat; a turn of the assistant may have several items."""
    match item.get("type", "message"):
        case "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            return {"role": role, "content": item.get("content")}
        case "function_call":
            call = {"id": item.get("call_id"), "function": item}
            return {"role": "assistant", "tool_calls": [call]}

        case "function_call_output":
            answer = {"role": "tool", "tool_call_id": item.get("call_id")}
            return answer | {"content": item.get("output")}

        case "reasoning":
            thoughts = clean_message({"role": "assistant", "content": item.get("content") or ""})
            return {"role": "assistant", "content": "", "reasoning_content": thoughts["content"]}
        case other:
            raise ValueError(f"an item of the type {other!r:.100} is not possible here")


def _joined(messages: list[Message]) -> list[Message]:
    """Return messages with the items of each turn of the assistant in one, and of the system."""
    joined: list[Message] = []
    for message in messages:
        role = message["role"]
        if not joined or role != joined[-1]["role"] or role not in ("assistant", "system"):
            joined.append(message)
            continue

        before = clean_message(joined[-1])
        calls = [*before.get("tool_calls", ()), *message.get("tool_calls", ())]
        texts = clean_message(message) if "content" in message else {}
        between = "\n\n" if role == "system" else ""
        for name in ("content", "reasoning_content"):
            before[name] = between.join(
                text for text in (before.get(name), texts.get(name)) if text
            )
        joined[-1] = before | ({"tool_calls": calls} if calls else {})
    return joined


def _tool(tool: Any) -> Body:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ValueError(f"a tool is an object of the type function, not {tool!r:.100}")
    described = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
    return {"type": "function", "function": described}


def reply(turn: Turn, parts: list[Part], served: EndpointModel, chat: Body) -> Body:
    """Return the reply to a request for a chat completion."""
    cut = turn.finish_reason == LENGTH
    status = "incomplete" if cut else "completed"
    output = [
        _item(part) | {"id": f"item_{turn.id}_{index}", "status": "completed"}
        for index, part in enumerate(parts)
    ]
    for item in output[-1:]:
        item["status"] = status

    read, sampled = len(turn.context_ids), len(turn.token_ids)
    response = {
        "id": f"resp_{turn.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": served.name,
        "output": output,
        "parallel_tool_calls": chat.get("parallel_tool_calls") is not False,
        "tool_choice": chat.get("tool_choice") or "auto",
        "tools": [],
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + sampled,
        },
    }
    Response.model_validate(response)
    return response


def _item(part: Part) -> Body:
    if part.kind == "call":
        called = {"name": part.name, "arguments": part.text}
        return {"type": "function_call", "call_id": part.id, **called}
    if part.kind == "thoughts":
        content: list[Body] = [{"type": "reasoning_text", "text": part.text}]
        return {"type": "reasoning", "summary": [], "content": content}
    content = [{"type": "output_text", "text": part.text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content}


async def events(growth: AsyncIterator[Growth], body: Body) -> AsyncIterator[str]:
    """Yield the server-sent events of a turn."""
    numbers = count()

    def event(kind: str, **content: Any) -> str:
        content |= {"type": kind, "sequence_number": next(numbers)}
        RESPONSES_EVENT.validate_python(content)
        return f"event: {kind}\n{server_event(content)}"

    begun: Body = {}
    async for turn, response, pieces in growth:
        if not begun:
            begun = response | {"status": "in_progress", "output": [], "usage": None}
            yield event("response.created", response=begun)
            yield event("response.in_progress", response=begun)

        for index, part, text, begins, ends in pieces:
            item = response["output"][index]
            kind, name = ITEM_DELTAS[part.kind]
            place: Body = {"output_index": index, "item_id": item["id"]}
            more: Body = {"name": part.name} if part.kind == "call" else {"content_index": 0}
            more |= {"logprobs": []} if part.kind == "text" else {}
            if begins:
                emptied: Body = {"arguments": ""} if part.kind == "call" else {"content": []}
                added = item | emptied | {"status": "in_progress"}
                yield event("response.output_item.added", item=added, output_index=index)
                if part.kind == "text":
                    empty = item["content"][0] | {"text": ""}
                    yield event("response.content_part.added", part=empty, content_index=0, **place)
            if text:
                yield event(f"{kind}.delta", delta=text, **place, **more)
            if ends:
                yield event(f"{kind}.done", **{name: part.text}, **place, **more)
                if part.kind == "text":
                    whole = item["content"][0]
                    yield event("response.content_part.done", part=whole, content_index=0, **place)
                yield event("response.output_item.done", item=item, output_index=index)
        if turn.finish_reason:
            yield event(f"response.{response['status']}", response=response)
