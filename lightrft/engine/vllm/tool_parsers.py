"""vLLM's parsers of tool calls, for models with a special format for calls."""

from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from lightrft.engine.build import ParseCalls


def tool_parser(name: str, tokenizer: Tokenizer, schemas: list[dict[str, Any]]) -> ParseCalls:
    """Return a function that splits a turn into text and calls (name, JSON arguments).

    It reads the turn's text with special tokens. Raises ValueError for an unknown name, or a parser
    that does not fit the tokenizer.
    """
    names = sorted(ToolParserManager.list_registered())
    if name not in names:
        raise ValueError(f"--tool_parser {name}: vLLM has {', '.join(names)}")
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}], model="", tools=schemas
    )
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    except Exception as error:  # each parser has another class of errors
        raise ValueError(
            f"--tool_parser {name} does not fit the tokenizer: {type(error).__name__}: {error}"
        ) from error

    def parse(text: str) -> tuple[str, list[tuple[str, str]]]:
        result = parser.extract_tool_calls(text, request)
        return result.content or "", [
            (call.function.name, call.function.arguments) for call in result.tool_calls
        ]

    return parse
