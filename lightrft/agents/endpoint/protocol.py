"""Bodies of requests and replies of the OpenAI API (chat completions, completions), and of vLLM's route for token ids."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from lightrft.agents.history import good_calls
from lightrft.agents.messages import Turn

Body = dict[str, Any]
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "top_logprobs": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "min_p": (0,),
    "repetition_penalty": (1,), "logit_bias": ({},), "stop": ([], ""), "min_tokens": (0,), "ignore_eos": (False,),
    "echo": (False,), "suffix": ("",), "tool_choice": ("auto", "none"), "response_format": ({"type": "text"},),
    "structured_outputs": ({},), "bad_words": ([],), "prompt_logprobs": (0,), "skip_special_tokens": (True, False),
}  # fmt: skip
"""Parameter of a request -> its values, beside null, with which tokens are sampled as the run samples them."""
RANGES = {"temperature": (0, 100), "top_p": (1e-6, 1), "top_k": (0, 1_000_000)}
"""Sampling parameters that a request chooses if the model does not learn, and their least and largest values."""


@dataclass(frozen=True, slots=True)
class EndpointModel:
    """Description of the model for clients, and how it is sampled."""

    name: str
    max_length: int
    """Number of tokens of prompt and response together."""
    fixed: Mapping[str, float]
    """The run's temperature, top_p and top_k if the model learns: a request with others is refused. Empty: requests choose."""
    end_token_ids: frozenset[int] = frozenset()


class Options(TypedDict):
    """Parameters of a request, as the methods of a session take them."""

    max_tokens: int | None
    sampling: dict[str, float]


def read_options(body: Body, served: EndpointModel) -> Options:
    """Return what a request chooses. Raises ValueError for a parameter that it cannot choose, or not so."""
    for name, value in served.fixed.items():
        if body.get(name) not in (None, value):
            raise ValueError(f"{name} is {value:g} in this run (--{name}), not {body[name]!r}: omit it in the request")
    for name, values in NEUTRAL.items():
        if body.get(name) is not None and body[name] not in values:
            raise ValueError(f"{name} {body[name]!r} is not possible: tokens are sampled as the run says; omit it")
    if ends := set(body.get("stop_token_ids") or ()) - served.end_token_ids:
        raise ValueError(f"stop_token_ids {sorted(ends)} do not end a turn in this run: add them to --stop_token_ids")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"the largest number of tokens is at least 1, not {limit!r}")
    chosen = {name: body[name] for name in RANGES if name not in served.fixed and body.get(name) is not None}
    for name, value in chosen.items():
        least, most = RANGES[name]
        if not isinstance(value, int | float) or not least <= value <= most:
            raise ValueError(f"{name} is a number from {least:g} to {most:g}, not {value!r}")
    return Options(max_tokens=limit, sampling=chosen)


def models(served: EndpointModel) -> Body:
    return {"object": "list", "data": [{"id": served.name, "object": "model", "owned_by": "lightrft",
                                        "max_model_len": served.max_length}]}  # fmt: skip


def chat_reply(turn: Turn, number: int, served: EndpointModel, body: Body) -> Body:
    """Return the reply to a chat completion. Tool calls are part of it if the request has tools."""
    calls = good_calls(turn) if body.get("tools") and body.get("tool_choice") != "none" else []
    written = [{"id": f"call_{number}_{place}", "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
               for place, call in enumerate(calls)]  # fmt: skip
    message = {"role": "assistant", "content": turn.content if calls else turn.text} | ({"tool_calls": written} if calls else {})
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else turn.finish_reason,
              "logprobs": {"content": _logprobs(turn)} if body.get("logprobs") else None}  # fmt: skip
    return _reply("chat.completion", "chatcmpl", turn, number, served, body, choice)


def completion_reply(turn: Turn, number: int, served: EndpointModel, body: Body) -> Body:
    """Return the reply to a completion."""
    logprobs = None
    if body.get("logprobs") is not None:
        logprobs = {"tokens": [f"token_id:{token}" for token in turn.token_ids], "token_logprobs": turn.logprobs,
                    "top_logprobs": None, "text_offset": []}  # fmt: skip
    choice = {"index": 0, "text": turn.text, "finish_reason": turn.finish_reason, "logprobs": logprobs}
    return _reply("text_completion", "cmpl", turn, number, served, body, choice)


def generate_reply(turn: Turn, number: int) -> Body:
    """Return the reply to a request of token ids."""
    choice = {"index": 0, "token_ids": turn.token_ids, "finish_reason": turn.finish_reason,
              "logprobs": {"content": _logprobs(turn)}}  # fmt: skip
    return {"request_id": f"gen-{number}", "choices": [choice]}


def _reply(kind: str, prefix: str, turn: Turn, number: int, served: EndpointModel, body: Body, choice: Body) -> Body:
    exact = {}
    if body.get("return_token_ids"):
        choice, exact = choice | {"token_ids": turn.token_ids}, {"prompt_token_ids": list(turn.context_ids)}
    read, written = len(turn.context_ids), len(turn.token_ids)
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {"id": f"{prefix}-{number}", "object": kind, "created": int(time.time()), "model": served.name, "choices": [choice],
            "usage": usage} | exact  # fmt: skip


def _logprobs(turn: Turn) -> list[Body]:
    return [{"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(turn.token_ids, turn.logprobs, strict=True)]  # fmt: skip


def events(reply: Body, body: Body) -> Iterator[str]:
    """Yield the server-sent events of a reply: the whole turn in one, then its end."""
    (choice,), usage = reply.pop("choices"), reply.pop("usage")
    head = reply | {"object": reply["object"].removesuffix(".chunk")}
    if "message" in choice:
        head["object"] += ".chunk"
        message = choice.pop("message")
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": place} | call for place, call in enumerate(calls)]
        first, last = choice | {"delta": message}, {"index": 0, "delta": {}}
    else:
        first, last = choice, {"index": 0, "text": ""}
    yield _event(head | {"choices": [first | {"finish_reason": None}]})
    yield _event(head | {"choices": [last | {"finish_reason": choice["finish_reason"], "logprobs": None}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _event(head | {"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(content: Body) -> str:
    return f"data: {json.dumps(content)}\n\n"


def problem(message: str, code: str = "invalid_request") -> Body:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
