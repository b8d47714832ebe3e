"""Turns of agents are rendered as rows are, and tool calls are read from what the model said."""

import json

import pytest

from data.test_rendering import (
    ADD,
    ASK,
    CHAT,
    SECTION,
    TOOL_CHAT,
    call,
    text,
    tokenizer,
    turn,
    with_bos,
)
from lightrft.core.samples import Prompt
from lightrft.data.rendering.tokens import text_tokens
from lightrft.extras.agents.history import TurnHistory, clean_message
from lightrft.extras.agents.messages import BEGINNING, ToolCall, Turn, TurnRequest
from lightrft.extras.agents.tool_calls import hermes
from lightrft.extras.agents.turn_format import TurnFormat
from tiny import BOS, EOS

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def test_schemas_of_requests_keep_nulls_that_the_author_wrote():
    field = {"enum": ["a", None], "default": None}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": field}}}
    template = CHAT.replace("tool.function.name", "tool.function | tojson")
    format = TurnFormat(SECTION, tokenizer(template), frozenset())
    prompt = format.prompt(Prompt(0, "", []), TurnRequest([ASK], BEGINNING, tools=[tool]))
    assert json.loads(prompt.text.partition(";")[0]) == tool


def test_a_completion_request_may_begin_with_bos():
    format = TurnFormat(SECTION, with_bos(), frozenset({EOS}))
    for sent in ("q", "<bos>q"):
        assert format.prompt(
            Prompt(0, "", []), TurnRequest(sent, BEGINNING, plain=True)
        ).token_ids == [BOS, ord("q")]
    assert text_tokens(with_bos(), "<bos>q", special_tokens=False) == [BOS, ord("q")]


def test_turns_follow_the_columns_of_their_row():
    format = TurnFormat(SECTION, tokenizer(), frozenset({EOS}))
    columns = {"prompt": TOOL_CHAT[:1], "chat_template_kwargs": {"prefill": "<b>"}, "tools": [ADD]}
    prompt = Prompt(0, "", [1], columns)
    begun = format.prompt(prompt, TurnRequest(" Now!"))
    assert begun.text == "add;<|user|>What is 6+1? Now!<|end|>\n<|assistant|><b>"
    between = format.tokens(TurnRequest([turn("tool", "7")]), None, columns)
    assert tokenizer().decode(between).endswith("<|tool|>7<|end|>\n<|assistant|><b>")

    with pytest.raises(ValueError, match="does not describe the tool add"):
        TurnFormat(SECTION, tokenizer("no tools"), frozenset()).prompt(
            prompt, TurnRequest([ASK], BEGINNING, tools=[ADD])
        )


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        (f"<think>I may {CALL}</think>\nNo.", f"<think>I may {CALL}</think>\nNo.", []),
        (
            f"<think>I may {CALL}</think>\nx{CALL}",
            f"<think>I may {CALL}</think>\nx",
            [ToolCall("f", {})],
        ),
        (f"<think>I may {CALL}", f"<think>I may {CALL}", []),
        (
            '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>',
            "",
            [ToolCall("f", {"a": 1})],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
            "",
            [ToolCall("f", {"a": "x\ny"})],
        ),
    ],
)
def test_calls_come_after_the_thinking(said, content, calls):
    assert hermes(said) == (content, calls)


def test_thinking_that_the_prompt_opens():
    format = TurnFormat(SECTION, tokenizer("cuts thinking"), frozenset({EOS}))
    assert format.opens_thinking(tokenizer().encode(text("q", "cuts thinking"))) == "<think>"
    assert format.opens_thinking(tokenizer().encode(text("q"))) == ""


def test_a_call_that_comes_back_is_recognised_in_either_form():
    """Why: an agent that sent the object of a call with a null began another conversation."""
    sampled = Turn("t", [1], "stop", tool_calls=[ToolCall("add", {"a": None})], context_ids=[7])
    for form in ({"a": None}, '{"a": null}'):
        history = TurnHistory()
        history.add(sampled, "policy", messages=[ASK])
        sent = [clean_message(each) for each in (ASK, call(form), TOOL_CHAT[2])]
        assert history.of_chat(sent, None)[0] == 0, form
