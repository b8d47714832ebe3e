"""Read chat messages as rows, agents and clients write them into one form."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightrft.config.tables import table

Message = dict[str, Any]

DATA_NAMES = table("data/rendering/names")
ROLES: dict[str, str] = DATA_NAMES["roles"]
"""Names of roles in data -> roles of chat templates. Other roles are left to the template."""
CALLS = ("function_call", "tool_call", "tool_calls")
"""ShareGPT's roles of an assistant turn that is JSON of calls."""
WEIGHT_KEYS = ("weight", "train", "loss")
"""Keys of a turn that say whether it is learned."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn with what the assistant thinks before the answer."""
THINKING = {"<think>": "</think>", "[THINK]": "[/THINK]", "<|channel>": "<channel|>"}
"""Mark that begins the thinking in a turn -> mark that ends it."""
THINKING_MARKS = (*THINKING, *THINKING.values())
SYSTEM_ROLES = ("system", "developer")
"""Roles of a row's own system message. Such a message takes the place of --system_prompt."""
BLOCKS = {"thinking", "tool_use", "tool_result"}
"""Types of parts in messages of Anthropic's API that OpenAI's have elsewhere in a message."""
TEXT_TYPES = ("text", "input_text", "output_text", "reasoning_text")
"""Types of parts that are text."""
MEDIA_TYPES: dict[str, str] = DATA_NAMES["media_types"]
"""Types of parts that are media, or keys of parts without a type -> types in chat templates."""
MESSAGE_KEYS = {*DATA_NAMES["message_keys"], *WEIGHT_KEYS, *THOUGHTS}
"""Keys that a message may have. An object with another one, in a text, is a value of the task."""
DIALOGUE = re.compile(r"(?:^|\n\n)(Human|Assistant):")
"""Beginning of a turn in the texts of HH-RLHF."""
INVISIBLE = re.compile(r"[\s\u00ad\u200b-\u200f\u2060-\u2064\ufeff]*")
"""White space, and characters without a width."""
PYTHON_LIST = re.compile(r"\[\s*\{\s*'(role|from|content|value)'")
"""Beginning of messages that were written with Python's str()."""


def as_messages(value: Any) -> list[Message] | None:
    """Return the chat messages of a list, also from ShareGPT or Anthropic; None if it has none.

    Raise ValueError for a message that cannot be read, and say which.
    """
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(isinstance(message, dict) for message in value):
        return None
    locations = [f"message {number} of {len(value)}" for number in range(1, len(value) + 1)]
    return [
        clean_message(converted, where)
        for message, where in zip(value, locations, strict=True)
        for converted in _without_blocks(message, where)
    ]


def objects_in_text(text: str) -> list[Message] | None:
    """Return the objects with a role that a text contains as JSON; None for any other text.

    Raise ValueError for messages in Python's form.
    """
    if PYTHON_LIST.match(text.lstrip()):
        raise ValueError(
            "its messages are written as Python prints them; write them as JSON, or pass"
            " --json_chats never if it is a text"
        )
    try:
        value = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return None

    is_chat = isinstance(value, list) and all(
        isinstance(entry, dict) and {"role", "from"} & entry.keys() for entry in value
    )
    return value if is_chat else None


def turns_in_text(text: str) -> list[Message] | None:
    """Return the turns of a text of HH-RLHF, without an empty one of the assistant at the end.

    It is `Human: ...`, an empty line, `Assistant: ...`, and so on. None for any other text.
    """
    before, *pieces = DIALOGUE.split(text)
    if before.strip() or pieces[:1] != ["Human"] or "Assistant" not in pieces[::2]:
        return None

    turns = zip(pieces[::2], map(str.strip, pieces[1::2]), strict=True)
    messages = [{"role": ROLES.get(name.lower(), "user"), "content": said} for name, said in turns]
    return messages if messages[-1]["content"] else messages[:-1]


def is_message(value: Message) -> bool:
    """Return whether an object has a known role, and nothing but the keys of a message."""
    role = value.get("role") or value.get("from")
    is_known = isinstance(role, str) and role.lower() in {*ROLES, *CALLS, *SYSTEM_ROLES}
    says = {"content", "value", "tool_calls", "function_call", *THOUGHTS} & value.keys()
    return is_known and bool(says) and value.keys() <= MESSAGE_KEYS


def _without_blocks(message: Message, where: str) -> list[Message]:
    """Return a message of Anthropic's API in OpenAI's form; others stay as they are.

    Its content has blocks for thinking, calls and results. Results become messages of their own.
    """
    parts = message.get("content")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return [message]

    blocks = {kind: [part for part in parts if part.get("type") == kind] for kind in BLOCKS}
    results = [
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": _result(part)}
        for part in blocks["tool_result"]
    ]
    calls = [
        {"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")}
        for part in blocks["tool_use"]
    ]
    thoughts = "\n".join(str(part.get("thinking") or "") for part in blocks["thinking"])
    if not any(blocks.values()):
        return [message]
    if results and (calls or thoughts):
        raise ValueError(f"{where} has results of tools beside thinking or calls")

    rest = [part for part in parts if part.get("type") not in BLOCKS]
    remaining = message | {"content": rest or None, "tool_calls": calls or None}
    remaining["reasoning_content"] = thoughts or None
    return results if results and not rest else [*results, remaining]


def _result(block: Message) -> Any:
    """Return the content of a tool's result. An error begins with `Error: `, as tools here do."""
    content = block.get("content") or ""
    if not block.get("is_error"):
        return content
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [{"type": "text", "text": "Error: "}, *parts]


def clean_message(message: Any, where: str = "the message") -> Message:
    """Return a message with a role of chat templates, texts joined, and without null keys.

    The content stays a list if it has other parts than text, and stays None for a turn of tool
    calls alone. Arguments of calls become objects. Raise ValueError for anything else.
    """
    if not isinstance(message, dict):
        raise ValueError(
            f"{where} is not an object with a role and a content, but {message!r:.100}"
        )

    keys = ", ".join(map(str, message))
    message = {name: value for name, value in message.items() if value is not None}

    role = _role(message, where)
    content = message.pop("value", None) if "content" not in message else message["content"]
    # ShareGPT writes calls as the content of a turn of their own.
    if role in CALLS:
        calls = parsed(content, f"the {role} of {where}") if isinstance(content, str) else content
        message["tool_calls"] = calls if isinstance(calls, list) else [calls]
        role = "assistant"
        content = None

    calls = _calls(message, where)
    thinks = any(message.get(name) for name in THOUGHTS)
    if content is None and not calls and not thinks:
        raise ValueError(f"{where}, of role {role!r}, has no content (its keys are {keys})")

    cleaned = message | {"role": role, "content": _content(content, where)}
    if content is None and not calls:
        cleaned["content"] = ""
    for name in WEIGHT_KEYS:
        if name in message and message[name] not in (0, 1):
            raise ValueError(
                f"{where} has the {name} {message[name]!r}: it must be 1 (learned) or 0"
            )

    return cleaned | ({"tool_calls": calls} if calls else {})


def _role(message: Message, where: str) -> str:
    """Take the role out of a message."""
    role = message.pop("role", None)
    sender = message.pop("from", None)
    name = sender if role is None else role
    if not isinstance(name, str):
        raise ValueError(f"{where} has no role: it is an object with a role and a content")
    standard = ROLES.get(name.lower()) or (name.lower() if name.lower() in CALLS else None)
    if role is None and standard is None:
        raise ValueError(f"the turn has the role {name!r}; known roles are {', '.join(ROLES)}")
    return standard or name


def _content(content: Any, where: str) -> Any:
    if content is None or isinstance(content, str):
        return content

    parts = [_part(part) for part in content] if isinstance(content, list | tuple) else [None]
    if not all(parts):
        raise ValueError(
            "the content of a chat message must be text, or a list of parts with a type, "
            f"not {shortened(content)} in {where}"
        )
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)

    return parts


def _part(part: Any) -> Message | None:
    """Return a part without null keys; None if it is none."""
    if not isinstance(part, dict):
        return None
    part = {name: value for name, value in part.items() if value is not None}
    kind = str(part.get("type") or next((name for name in MEDIA_TYPES if name in part), "text"))
    if kind in TEXT_TYPES:
        return {"type": "text", "text": part["text"]} if isinstance(part.get("text"), str) else None
    return part | {"type": MEDIA_TYPES.get(kind, kind)}


def _calls(message: Message, where: str) -> list[Message]:
    """Take the tool calls out of a message."""
    calls = message.pop("tool_calls", None) or []
    if old := message.pop("function_call", None):
        calls = [*calls, old]
    if isinstance(calls, str):
        calls = parsed(calls, f"the tool_calls of {where}")
    if not isinstance(calls, list | tuple):
        raise ValueError(f"the tool_calls of {where} are not a list, but {shortened(calls)}")
    return [_call(call, where) for call in calls]


def _call(call: Any, where: str) -> Message:
    """Return a call in the form of OpenAI, with the arguments as an object."""
    call = parsed(call, f"a tool call of {where}") if isinstance(call, str) else call
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"a tool call of {where} is not {{'function': {{'name': ..., 'arguments': JSON}}}}:"
            f" {shortened(call)}"
        )

    name = function["name"]
    arguments = function.get("arguments") or {}
    # OpenAI's servers send arguments as JSON text, data often as an object.
    if isinstance(arguments, str):
        arguments = parsed(arguments, f"the arguments of the tool call {name} in {where}")
    if not isinstance(arguments, dict):
        raise ValueError(
            f"the arguments of the tool call {name} in {where} are not an object:"
            f" {shortened(arguments)}"
        )

    identity = {"id": call["id"]} if call.get("id") else {}
    return identity | {"type": "function", "function": {"name": name, "arguments": arguments}}


def without_null_arguments(call: Message, tools: Sequence[Mapping[str, Any]]) -> Message:
    """Return a call without null arguments, as Arrow and files made of it add them.

    One that the schema of the tool requires was written by somebody, and stays.
    """
    function = call["function"]
    matching = [tool["function"] for tool in tools if tool["function"]["name"] == function["name"]]
    schema = matching[-1].get("parameters") if matching else None
    return call | {"function": function | {"arguments": _given(function["arguments"], schema)}}


def _given(value: Any, schema: Any) -> Any:
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, list | tuple):
        return [_given(inner, schema.get("items")) for inner in value]
    if not isinstance(value, Mapping):
        return value

    required = schema.get("required") or ()
    inner_schemas = schema.get("properties") or {}
    return {
        name: _given(inner, inner_schemas.get(name))
        for name, inner in value.items()
        if inner is not None or name in required
    }


def as_tools(value: Any, *, written: bool = False) -> list[dict[str, Any]]:
    """Return the schemas of tools in the form of OpenAI; they may be JSON text.

    `written`: somebody wrote the nulls in them, as in JSON text; Arrow added the others. Raise
    ValueError for values that describe no tools.
    """
    value = value if written else without_nulls(value)
    value = parsed(value, "tools") if isinstance(value, str) and value.strip() else value
    if not value:
        return []
    if not isinstance(value, list | tuple):
        value = [value]
    return [
        _tool(parsed(tool, "a tool") if isinstance(tool, str) and "{" in tool else tool)
        for tool in value
    ]


def _tool(tool: Any) -> dict[str, Any]:
    if isinstance(tool, dict) and "input_schema" in tool:  # Anthropic's
        others = {name: value for name, value in tool.items() if name != "input_schema"}
        tool = others | {"parameters": tool["input_schema"]}
    if isinstance(tool, dict) and "function" not in tool:
        tool = {"type": "function", "function": tool}
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            "tools are schemas that the chat template describes, each an object with a name, not "
            f"{shortened(tool)}; give the column 'tools' another name if it is something else"
        )
    return tool


def as_object(value: Any, name: str) -> dict[str, Any]:
    """Return a column that is an object or JSON text of one, empty if null.

    Raise ValueError otherwise.
    """
    value = without_nulls(value)
    value = parsed(value, name) if isinstance(value, str) and value.strip() else value
    if value and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, not {shortened(value)}")
    return dict(value or {})


def parsed(text: str, name: str) -> Any:
    """Return the JSON value of a text. Raise ValueError that says what is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: not valid JSON ({error}): {shortened(text)}") from error


def without_nulls(value: Any) -> Any:
    """Return a value of a row without null keys; Arrow adds these for what a row lacks.

    JSON text stays as it is, with the nulls that somebody wrote.
    """
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value


def is_blank(text: str) -> bool:
    """Return True for a text without a character that can be seen."""
    return bool(INVISIBLE.fullmatch(text))


def is_answer(message: Message) -> bool:
    """Return True if the message is from the assistant."""
    return message.get("role") == "assistant"


def weight_of(message: Message) -> bool | None:
    """Return whether a turn says that it is learned; None if it does not say."""
    weights = [bool(message[name]) for name in WEIGHT_KEYS if name in message]
    return all(weights) if weights else None


def shortened(value: Any) -> str:
    """Return the beginning of a value's repr, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
