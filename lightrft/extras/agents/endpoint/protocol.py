"""Requests and replies of the OpenAI API (chat completions, completions), and vLLM's for token ids.

A request is checked by the meaning before anything is done with it; a ValueError says what is
wrong.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightrft.algorithms.rollout.episode_roles import POLICY, ROLE_MARK
from lightrft.config.tables import table
from lightrft.config.values import check_text
from lightrft.extras.agents.endpoint.parts import Body, Growth, Part, Stored
from lightrft.extras.agents.messages import RANGES, Turn, check_sampling, check_stop

PARAMETERS = "extras/agents/endpoint/parameters"
NEUTRAL_VALUES: Mapping[str, list[Any]] = table(PARAMETERS)["neutral"]
"""Parameter of a request -> values, beside null, that leave sampling as the run sets it."""
DECIDED_BY_RUN: list[str] = table(PARAMETERS)["decided_by_run"]
"""Further parameters that change what is sampled, and that a run decides."""
REQUEST_BYTES_PER_TOKEN = 16
"""Largest size of a request for each token of prompt and response.

Text, token ids and escapes of JSON have to fit.
"""
OTHER_BYTES = 1 << 16
"""Further bytes of a request, such as schemas of tools."""


@dataclass(frozen=True, slots=True)
class EndpointModel:
    """Description of the model for clients, and how it is sampled."""

    name: str
    max_length: int
    """Number of tokens of prompt and response together."""
    fixed: Mapping[str, float]
    """The run's temperature, top_p, top_k and min_p if the model learns. Empty: requests choose."""
    end_token_ids: frozenset[int] = frozenset()
    records: bool = False
    """True if each exchange is sent to the rank (--agent_record)."""
    refuses: bool = False
    """True if a request with other sampling parameters is refused, rather than sampled as the run
    says."""

    @property
    def max_request_bytes(self) -> int:
        """Return the largest number of bytes that a request may have."""
        return REQUEST_BYTES_PER_TOKEN * self.max_length + OTHER_BYTES


def read_body(content: bytes) -> Body:
    """Return the object of a request.

    Raises ValueError if it is none, has text that no tokenizer reads, or a parameter of another
    type.
    """
    body = json.loads(content)
    if not isinstance(body, dict):
        raise ValueError("the request is not a JSON object")
    check_text(json.dumps(body, ensure_ascii=False))
    for name, kinds in table(PARAMETERS)["types"].items():
        if body.get(name) is not None and type(body[name]).__name__ not in kinds:
            raise ValueError(f"{name} is of the type {' or '.join(kinds)}, not {body[name]!r:.100}")
    return body


def overridden(body: Body, served: EndpointModel) -> Body:
    """Return the parameters of a request in whose place the run's are used.

    Raises ValueError for values that are none.
    """
    if not served.fixed or served.refuses:
        return {}
    check_sampling({name: body[name] for name in RANGES if body.get(name) is not None})
    return {
        name: body[name]
        for name in (*served.fixed, *DECIDED_BY_RUN)
        if body.get(name) not in (None, served.fixed.get(name), *NEUTRAL_VALUES.get(name, ()))
    }


def read_options(body: Body, served: EndpointModel) -> dict[str, Any]:
    """Return the sampling options of a request, as the methods of a session take them.

    Raises ValueError for an option that requests cannot choose here, or a value that is not
    supported.
    """
    for name, value in served.fixed.items():
        if body.get(name) not in (None, value):
            raise ValueError(
                f"{name} is {value:g} in this run (--{name}), not {body[name]!r:.100}: omit it in"
                " the request"
            )

    reason = (
        "tokens are sampled as the run says" if served.fixed else "this server does not support it"
    )
    for name, values in NEUTRAL_VALUES.items():
        if body.get(name) is not None and not any(
            body[name] is value or body[name] == value for value in values
        ):
            raise ValueError(f"{name} {body[name]!r:.100} is not possible: {reason}; omit it")

    _check_tools(body)
    ends = set(_token_ids(body.get("stop_token_ids") or [], "stop_token_ids"))
    if others := ends - served.end_token_ids:
        where = "of this server, whose flag is --stop_token_ids"
        if served.fixed:
            where = "in this run: add them to --stop_token_ids"
        raise ValueError(f"stop_token_ids {sorted(others)} do not end a turn {where}")

    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    check_stop(stop)
    limits = [
        body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None
    ]
    for limit in limits:
        if type(limit) is not int or limit < 1:
            raise ValueError(
                f"the largest number of tokens is a whole number from 1, not {limit!r:.100}"
            )

    chosen = {
        name: body[name]
        for name in RANGES
        if name not in served.fixed and body.get(name) is not None
    }
    check_sampling(chosen)
    if "top_k" in chosen:
        chosen["top_k"] = max(chosen["top_k"], 0)  # others write -1 for all tokens

    model = body.get("model") or ""
    role = model.removeprefix(ROLE_MARK) if model.startswith(ROLE_MARK) else POLICY
    most = min(limits, default=None)
    return {"max_tokens": most, "sampling": chosen, "stop": stop, "role": role}


def _check_tools(body: Body) -> None:
    for tool in body.get("tools") or ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                "a tool is {'type': 'function', 'function': {'name': ..., ...}}, not"
                f" {tool!r:.100}"
            )


def read_prompt(prompt: Any) -> str | list[int]:
    """Return the prompt of a completion: one text, or one list of token ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and any(isinstance(each, str | list) for each in prompt):
        raise ValueError("a request has one prompt: send several requests at the same time")
    return read_token_ids(prompt)


def read_token_ids(value: Any) -> list[int]:
    """Return the tokens of a prompt. Raises ValueError if it has none."""
    if not value:
        raise ValueError("the prompt is empty: it is a text or a list of token ids")
    return _token_ids(value, "the prompt, which is a text or a list of token ids,")


def _token_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(f"{name} is not a list of whole numbers: {value!r:.100}")
    return value


def models(served: EndpointModel) -> Body:
    model = {"id": served.name, "object": "model", "owned_by": "lightrft"}
    return {"object": "list", "data": [model | {"max_model_len": served.max_length}]}


def chat_body(body: Body, stored: Stored) -> Body:
    return body | {"kept": None}


def chat_reply(turn: Turn, parts: list[Part], served: EndpointModel, body: Body) -> Body:
    """Return the reply to a chat completion."""
    calls = [
        {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}
        for part in parts
        if part.kind == "call"
    ]
    content = "".join(part.text for part in parts if part.kind == "text")
    # A turn that was cut after a call says so, as it does to clients of other servers.
    ended = turn.finish_reason == "stop"
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content}
        | ({"tool_calls": calls} if calls else {}),
        "finish_reason": "tool_calls" if calls and ended else turn.finish_reason,
        "logprobs": {"content": _logprobs(turn)} if body.get("logprobs") else None,
    }

    return _reply("chat.completion", "chatcmpl", turn, served, body, choice)


def completion_reply(turn: Turn, served: EndpointModel, body: Body) -> Body:
    """Return the reply to a completion."""
    logprobs = None
    if body.get("logprobs") is not None:
        logprobs = {
            "tokens": [f"token_id:{token}" for token in turn.token_ids],
            "token_logprobs": turn.logprobs,
            "top_logprobs": None,
            "text_offset": [],
        }

    said = {"text": turn.text, "logprobs": logprobs}
    choice = {"index": 0, **said, "finish_reason": turn.finish_reason}
    return _reply("text_completion", "cmpl", turn, served, body, choice)


def generate_reply(turn: Turn) -> Body:
    """Return the reply to a request of token ids."""
    choice = {
        "index": 0,
        "token_ids": turn.token_ids,
        "finish_reason": turn.finish_reason,
        "logprobs": {"content": _logprobs(turn)},
    }
    return {"request_id": f"gen-{turn.id}", "choices": [choice]}


def _reply(
    kind: str, prefix: str, turn: Turn, served: EndpointModel, body: Body, choice: Body
) -> Body:
    exact = {}
    if body.get("return_token_ids"):
        choice = choice | {"token_ids": turn.token_ids}
        exact = {"prompt_token_ids": list(turn.context_ids)}

    read = len(turn.context_ids)
    written = len(turn.token_ids)
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    return {
        "id": f"{prefix}-{turn.id}",
        "object": kind,
        "created": int(time.time()),
        "model": served.name,
        "choices": [choice],
        "usage": usage,
    } | exact


def _logprobs(turn: Turn) -> list[Body]:
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(turn.token_ids, turn.logprobs, strict=True)
    ]


async def events(growth: AsyncIterator[Growth], body: Body) -> AsyncIterator[str]:
    """Yield the server-sent events of a chat completion, or of a completion, which is complete."""
    async for turn, reply, pieces in growth:
        (choice,) = reply["choices"]
        head = {name: value for name, value in reply.items() if name != "usage"}
        if message := choice.pop("message", None):
            head["object"] = "chat.completion.chunk"
            message["content"] = "".join(
                piece.text for piece in pieces if piece.part.kind == "text"
            )
            for index, call in enumerate(message.get("tool_calls", ())):
                call["index"] = index
        first, last = ({"delta": message}, {"delta": {}}) if message else ({}, {"text": ""})

        if pieces or turn.finish_reason:
            yield event(head | {"choices": [choice | first | {"finish_reason": None}]})
        if turn.finish_reason:
            last |= {"index": 0, "finish_reason": choice["finish_reason"], "logprobs": None}
            yield event(head | {"choices": [last]})
            if (body.get("stream_options") or {}).get("include_usage"):
                yield event(head | {"choices": [], "usage": reply["usage"]})
            yield "data: [DONE]\n\n"


def event(content: Body) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def problem(message: str, code: str = "invalid_request") -> Body:
    return {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    }
