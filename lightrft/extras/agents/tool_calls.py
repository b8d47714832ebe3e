"""Read the tool calls that a turn of the model has after its thinking."""

import json
import re
from collections.abc import Callable

from lightrft.config.values import check_text
from lightrft.data.rendering.messages import THINKING, THINKING_MARKS
from lightrft.extras.agents.messages import ToolCall

Parse = Callable[[str], tuple[str, list[ToolCall]]]
"""Function from the text of a turn to the text without calls, and the calls."""
HERMES_BEGIN = "<tool_call>"
HERMES_END = "</tool_call>"
AFTER_CALL = re.compile(rf"\s*(?:{HERMES_END}|(?={HERMES_BEGIN})|(?:</?[a-z_]*)?\Z)")
"""What follows the JSON of a call: the tag, or, as models forget it, the next call or the end."""


def after_thinking(parse: Parse) -> Parse:
    """Return a function that reads the calls after the thinking.

    The thinking stays in the text.
    """

    def read(text: str) -> tuple[str, list[ToolCall]]:
        start = _after_thinking(text)
        content, calls = parse(text[start:])
        return text[:start] + content if calls else text, calls

    return read


def _after_thinking(text: str) -> int:
    """Return the number of characters up to the end of the thinking, which may be unfinished."""
    start = max(text.rfind(end) + len(end) if end in text else 0 for end in THINKING.values())
    return len(text) if any(text.find(begin, start) >= 0 for begin in THINKING) else start


@after_thinking
def hermes(text: str) -> tuple[str, list[ToolCall]]:
    """Read calls such as <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>.

    Hermes and Qwen models write them. The last tag may be missing, and strings may have tags in
    them.
    """
    content = ""
    calls = []
    while HERMES_BEGIN in text:
        before, _, text = text.partition(HERMES_BEGIN)
        content += before
        if HERMES_END not in text and not text.lstrip().startswith("{"):
            content += HERMES_BEGIN  # it only speaks of the tag
            continue
        end = _end_of_call(text)
        calls.append(_call(text[:end]))
        text = AFTER_CALL.sub("", text[end:], count=1)
    return (content + text).rstrip(), calls


def _end_of_call(text: str) -> int:
    """Return the number of characters of the first call in a text that begins with it."""
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text, len(text) - len(text.lstrip()))
    except (ValueError, RecursionError):
        end = 0
    if end and AFTER_CALL.match(text, end):
        return end
    end = text.find(HERMES_END)
    return end if end >= 0 else len(text)


def settled(text: str, *, with_calls: bool) -> str:
    """Return what of an unfinished text is surely neither in a call of hermes nor in a mark.

    White space at the end is left out, because a call may follow.
    """
    begin = text.find(HERMES_BEGIN, _after_thinking(text)) if with_calls else -1
    text = text if begin < 0 else text[:begin]
    marks = (*THINKING_MARKS, HERMES_BEGIN)
    begun = {mark[:size] for mark in marks for size in range(1, len(mark))}
    held = max((len(each) for each in begun if text.endswith(each)), default=0)
    return text[: len(text) - held].rstrip()


def read_call(name: str, arguments: str) -> ToolCall:
    """Return a call from a parser that gives the arguments as JSON."""
    return _call(json.dumps({"name": name, "arguments": arguments}))


def _call(content: str) -> ToolCall:
    try:
        call = json.loads(content, strict=False)  # models write line breaks inside of strings
        name = call["name"]
        arguments = call.get("arguments", call.get("parameters", {}))
        arguments = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
        # No server of tools and no client could read half a character, or a number without a value.
        check_text(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return ToolCall(
            "", {}, f'the call is not of the form {{"name": ..., "arguments": {{...}}}} ({error})'
        )

    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", {}, "the name of a call is a string, and its arguments are an object")
    return ToolCall(name, arguments)
