"""SGLang's parsers of tool calls, for models that write calls in a format of their own."""

from collections.abc import Callable
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from transformers import PreTrainedTokenizerBase


def tool_parser(
    name: str, tokenizer: PreTrainedTokenizerBase, schemas: list[dict[str, Any]]
) -> Callable[[str], tuple[str, list[tuple[str, str]]]]:
    """Return a function from the text of a turn, with its special tokens, to its text without
    calls, and the name and the JSON arguments of each call.

    Raises ValueError for an unknown name, or a parser that does not fit the tokenizer.
    """
    names = sorted(FunctionCallParser.ToolCallParserEnum)
    if name not in names:
        raise ValueError(f"--tool_parser {name}: SGLang has {', '.join(names)}")
    tools = [Tool(**schema) for schema in schemas]
    try:
        FunctionCallParser(tools, name, tokenizer)
    except Exception as error:  # of many classes, one for each parser
        raise ValueError(
            f"--tool_parser {name} does not fit the tokenizer: {type(error).__name__}: {error}"
        ) from error

    def parse(text: str) -> tuple[str, list[tuple[str, str]]]:
        parser = FunctionCallParser(tools, name, tokenizer)  # it numbers the calls of one turn
        if not parser.has_tool_call(text):
            return text, []
        content, calls = parser.parse_non_stream(text)
        return content, [(call.name or "", call.parameters) for call in calls]

    return parse
