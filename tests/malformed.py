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


USER = {"role": "user", "content": "p"}
NO_TEXT = (
    5,
    True,
    {"text": "p"},
    [5],
    ["p"],
    [{}],
    [{"type": "image"}],
    [{"type": "text"}],
    "\ud800",
)
NO_OBJECTS = (5, "p", {"a": 1}, [5], ["p"], [None], [[]])
NO_NUMBER = ("5", 0, -1, 1.5, True, [], {}, [5])
NO_STOPS = (5, {}, [5], [""], [None], ["a"] * 17, True)
NO_TEMPERATURE = ("hot", -1, 101, True, [1], {}, 1e-9)


def bodies_of(route):
    """Return malformed bodies of Anthropic's Messages, or of OpenAI's Responses."""
    if route == "/v1/messages":
        base = {"model": "m", "max_tokens": 5, "messages": [USER]}
        wrong = {
            "messages": (None, [], {}, *NO_OBJECTS, [USER, {"role": "assistant", "content": "a"}]),
            "system": NO_TEXT,
            "max_tokens": NO_NUMBER,
            "stop_sequences": NO_STOPS,
            "temperature": NO_TEMPERATURE,
            "top_p": (0, 2, "a", -1, [], {"a": 1}),
            "top_k": ("a", 1.5, -2, [], {"a": 1}),
            "tools": (5, "x", [5], [{}], [{"name": 5}], [{"type": "web_search_20250305"}], [None]),
            "tool_choice": ("auto", 5, ["auto"], {"type": "any"}, {"type": "tool", "name": "f"}, {"a": 1}),
            "stream": ("yes", 1, [], {}, 0),
            "model": (5, [], {}),
        }  # fmt: skip
        contents = [
            *NO_TEXT,
            [{"type": "tool_use", "name": 5, "input": {}}],
            [{"type": "tool_use", "name": "f", "input": 5}],
            [{"type": "tool_use", "name": "f", "input": "{"}],
            [{"type": "tool_result"}, {"type": "tool_use", "name": "f", "input": {}}],
            [{"type": "document"}, {"type": "text", "text": "a"}],
            [{"type": "tool_result", "tool_use_id": "a", "content": 5}],
            [{"type": "tool_result", "tool_use_id": "a", "content": 5, "is_error": True}],
            [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
            [{"type": "tool_use", "input": {}}],
            [{"type": "tool_use", "name": "f", "input": [1]}],
            [{"type": "redacted_thinking", "data": "x"}],
            [{"text": 5}],
            [None],
        ]
        wrong["messages"] += tuple([{"role": "user", "content": each}] for each in contents)
        wrong["messages"] += tuple(
            [{"role": each, "content": "p"}] for each in (5, "", None, [], {})
        )
    else:
        base = {"model": "m", "input": "p"}
        wrong = {
            "input": (None, [], {}, 5, *NO_OBJECTS[2:], "\ud800"),
            "instructions": NO_TEXT,
            "max_output_tokens": NO_NUMBER,
            "temperature": NO_TEMPERATURE,
            "top_p": (0, 2, "a", -1, [], {"a": 1}),
            "tools": (5, "x", [5], [{}], [{"type": "function"}], [{"type": "web_search"}], [None]),
            "tool_choice": ("required", 5, ["auto"], {"type": "function", "name": "f"}, {"a": 1}),
            "previous_response_id": ("resp_99", 5, "", [], {}),
            "text": ({"format": {"type": "json_schema"}}, 5, "a", [1]),
            "background": (True, 1, "yes"),
            "stream": ("yes", 1, [], {}, 0),
            "top_logprobs": (3, "a", [1]),
        }  # fmt: skip
        items = [
            {"type": "web_search_call"},
            {"type": 5},
            {"type": "function_call", "name": 5, "arguments": "{}"},
            {"type": "function_call", "name": "f", "arguments": "{"},
            {"type": "function_call", "name": "f", "arguments": 5},
            {"type": "function_call_output", "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": 5},
            {"type": "reasoning", "content": 5},
            {"type": "reasoning", "content": [5]},
            {"type": "computer_call"},
            {"type": "item_reference", "id": "item_0_0"},
            {"type": "function_call", "arguments": "{}"},
            {"type": "function_call", "name": "f", "arguments": "[1]"},
            {"type": "function_call_output", "output": [{"type": "input_image"}]},
            *({"role": "user", "content": each} for each in NO_TEXT),
            *({"role": each, "content": "p"} for each in (5, "", None, [], {})),
        ]
        wrong["input"] += tuple([each, USER] for each in items)
    return [base | {name: value} for name, values in wrong.items() for value in values]
