"""Read the tool calls in a turn of the model."""

import json
import re
from collections.abc import Callable

from lightrft.agents.messages import ToolCall

Parse = Callable[[str], tuple[str, list[ToolCall]]]
"""Function from the text of a turn to its text without calls, and its calls."""
HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def hermes(text: str) -> tuple[str, list[ToolCall]]:
    """Read calls such as <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>: those of Hermes and Qwen models."""
    return HERMES.sub("", text).strip(), [_call(content) for content in HERMES.findall(text)]


def read_call(name: str, arguments: str) -> ToolCall:
    """Return a call of a parser that gives its arguments as JSON."""
    return _call(json.dumps({"name": name, "arguments": arguments}))


def _call(content: str) -> ToolCall:
    try:
        call = json.loads(content)
        name, arguments = call["name"], call.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return ToolCall("", {}, f"the call is not of the form {{\"name\": ..., \"arguments\": {{...}}}} ({error})")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", {}, "the name of a call is a string, and its arguments are an object")
    return ToolCall(name, arguments)
