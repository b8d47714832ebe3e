"""SGLang's parsers of tool calls, for models with a special format for calls."""

from typing import Any

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.engine.build import ParseCalls


def tool_parser(name: str, tokenizer: Tokenizer, schemas: list[dict[str, Any]]) -> ParseCalls:
    """Return a function that splits a turn into text and calls (name, JSON arguments).

    It reads the turn's text with special tokens. Raises ValueError for an unknown name, or a parser
    that does not fit the tokenizer.
    """
    names = sorted(FunctionCallParser.ToolCallParserEnum)
    if name not in names:
        raise ValueError(f"--tool_parser {name}: SGLang has {', '.join(names)}")
    tools = [Tool(**schema) for schema in schemas]
    try:
        FunctionCallParser(tools, name, tokenizer)
    except Exception as error:  # each parser has another class of errors
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
