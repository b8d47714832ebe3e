"""Malformed requests of each kind, with a word that the answer must contain."""

CHAT = {"messages": [{"role": "user", "content": "p"}]}


def _chat(**more):
    return CHAT | more


def _message(**message):
    return {"messages": [message]}


def _nested(levels):
    return {"properties": {"a": _nested(levels - 1)}} if levels else {}


DEEP = [{"type": "function", "function": {"name": "f", "parameters": _nested(400)}}]


MALFORMED = [
    ("/v1/completions", {"prompt": ""}, "the prompt is empty"),
    ("/v1/completions", {"prompt": []}, "the prompt is empty"),
    ("/v1/completions", {}, "the prompt is empty"),
    ("/v1/completions", {"prompt": ["a", "b"]}, "one prompt"),
    ("/v1/completions", {"prompt": [[1], [2]]}, "one prompt"),
    ("/v1/completions", {"prompt": {"a": 1}}, "whole numbers"),
    ("/v1/completions", {"prompt": [True]}, "whole numbers"),
    ("/v1/completions", {"prompt": [1.5]}, "whole numbers"),
    ("/v1/completions", {"prompt": [-1]}, "not one of the"),
    ("/v1/completions", {"prompt": [10**30]}, "not one of the"),
    ("/v1/completions", {"prompt": "\ud800"}, "half of a character"),
    ("/v1/completions", {"prompt": "a", "max_tokens": True}, "whole number from 1"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "whole number from 1"),
    ("/v1/completions", {"prompt": "a", "max_tokens": "5"}, "whole number from 1"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1e9}, "whole number from 1"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [[1]]}, "stop_token_ids"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": 5}, "stop_token_ids"),
    ("/v1/completions", {"prompt": "a", "stream": "yes"}, "stream"),
    ("/v1/completions", {"prompt": "a", "logprobs": "all"}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "n": 2}, "n 2 is not possible"),
    ("/v1/completions", {"prompt": "a", "n": [1]}, "n [1] is not possible"),
    ("/v1/completions", {"prompt": "a", "presence_penalty": 1}, "presence_penalty"),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "json"}}, "response_format"),
    ("/v1/completions", {"prompt": "a", "top_logprobs": 5}, "top_logprobs"),
    ("/v1/chat/completions", _chat(messages={}), "messages"),
    ("/v1/chat/completions", _chat(messages=None), "messages"),
    ("/v1/chat/completions", _chat(messages=[5]), "is not an object with a role"),
    ("/v1/chat/completions", _message(role=5, content="p"), "has no role"),
    ("/v1/chat/completions", _message(role="", content="p"), "has no role"),
    ("/v1/chat/completions", _message(role="user", content=5), "content"),
    ("/v1/chat/completions", _message(role="user", content={"text": "p"}), "content"),
    ("/v1/chat/completions", _message(role="user", content=[{"text": None}]), "content"),
    ("/v1/chat/completions", _message(role="user", content="p", tool_calls=5), "tool_calls of"),
    ("/v1/chat/completions", _message(role="user", content="p", tool_calls=["f"]), "tool call"),
    (
        "/v1/chat/completions",
        _message(role="user", content="p", tool_calls=[{"function": "f"}]),
        "tool call",
    ),
    (
        "/v1/chat/completions",
        _message(role="user", content="p", tool_calls=[{"function": {"name": 5}}]),
        "tool call",
    ),
    ("/v1/chat/completions", _message(role="user", content="p", name=5), "name"),
    ("/v1/chat/completions", _chat(tools={}), "tools"),
    ("/v1/chat/completions", _chat(tools=[1]), "a tool is"),
    ("/v1/chat/completions", _chat(tools=[{"function": {}}]), "a tool is"),
    ("/v1/chat/completions", _chat(stream=True, stream_options=5), "stream_options"),
    ("/v1/chat/completions", _chat(tool_choice={"type": "function"}), "tool_choice"),
    ("/inference/v1/generate", {"token_ids": []}, "the prompt is empty"),
    ("/inference/v1/generate", {"token_ids": "a"}, "whole numbers"),
    ("/inference/v1/generate", {"token_ids": [65], "sampling_params": [1]}, "sampling_params"),
]
OF_A_SERVER = [
    ("/v1/chat/completions", _chat(tools=DEEP), "nested more than 100 deep"),
    ("/v1/completions", {"prompt": "a", "top_k": 2.5}, "top_k is a whole number"),
    ("/v1/completions", {"prompt": "a", "top_k": True}, "top_k is a whole number"),
    ("/v1/completions", {"prompt": "a", "top_k": "5"}, "top_k is a whole number"),
    ("/v1/completions", {"prompt": "a", "top_p": 0}, "top_p is a number"),
    ("/v1/completions", {"prompt": "a", "top_p": float("nan")}, "top_p is a number"),
    (
        "/v1/completions",
        {"prompt": "a", "temperature": 1e-45},
        "temperature is 0, or at least 1e-06",
    ),
    ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature is a number from 0"),
    ("/v1/completions", {"prompt": "a", "temperature": "hot"}, "temperature is a number from 0"),
    ("/v1/completions", {"prompt": "a", "temperature": 1e400}, "temperature is a number from 0"),
    ("/v1/completions", {"prompt": "a", "temperature": [1]}, "temperature is a number from 0"),
]
NO_JSON = [
    b"",
    b"[]",
    b"{",
    b"null",
    b"\xff",
    b'{"prompt": ' + b"[" * 50_000,
    b'{"prompt": ' + b"1" * 5000 + b"}",
]
