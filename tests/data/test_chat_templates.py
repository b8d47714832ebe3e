"""Rows in all forms with the chat templates in TRL's wheel.

Each goes from row to prompt, learned answer and agent's turn.
"""

import json
import re
from importlib import import_module

import pytest
from loguru import logger

from lightrft.config import DataSection, PreferenceSection
from lightrft.core.samples import Prompt
from lightrft.data.conversations import make_example
from lightrft.data.preferences import pair_maker
from lightrft.data.prompts import RowContext, make_prompt
from lightrft.data.rendering.messages import as_messages, clean_message
from lightrft.data.rendering.template import turn_end_ids
from trl_templates import NEEDS_PARTS, SECTION, SHIPPED, SPECIAL, THOUGHT, tokenizer, turn

pytestmark = pytest.mark.skipif(not SHIPPED, reason="TRL, which has the templates, is missing")

QUESTION = "What is 6+1?"
THIRD = "And 7+1?"
ANSWER = "It is 7."
OTHER = "It is 8."


def parts(text: str) -> list[dict]:
    return [
        {"type": "text", "text": text[:5], "image": None},
        {"type": "text", "text": text[5:], "image": None},
    ]


PROMPTS = {
    "text": QUESTION,
    "messages": [turn("user", QUESTION)],
    "ShareGPT": [{"from": "human", "value": QUESTION}],
    "another name of the role": [turn("human", QUESTION)],
    "parts": [turn("user", parts(QUESTION))],
    "nulls": [turn("user", QUESTION, tool_calls=None, name=None, **{"from": None})],
    "JSON text": json.dumps([turn("user", QUESTION)]),
}


def asked(name: str, value, section: DataSection = SECTION, **columns) -> Prompt:
    """Return the prompt of a row."""
    return make_prompt(RowContext(section, tokenizer(name)), {"input": value} | columns)


def learned(name: str, row: dict, section: DataSection = SECTION) -> str:
    """Return what is learned from a row."""
    reader = tokenizer(name)
    token_ids, flags = make_example(RowContext(section, reader), row).columns["label"]
    return reader.decode([token for token, on in zip(token_ids, flags, strict=True) if on])


def reference(name: str, *messages: dict, answer_follows: bool = True) -> str:
    """Return the text that transformers renders for messages in their plainest form."""
    plain = [
        message | {"content": parts(message["content"])}
        if name.startswith(NEEDS_PARTS)
        else message
        for message in messages
    ]
    return tokenizer(name).apply_chat_template(
        plain, tokenize=False, add_generation_prompt=answer_follows
    )


def turn_format(section: DataSection, reader):
    """Return what renders the turns of agents, and the module of their requests."""
    turns = pytest.importorskip("lightrft.extras.agents.turn_format")
    ends = turn_end_ids(section, reader)
    return turns.TurnFormat(section, reader, ends), import_module("lightrft.extras.agents.messages")


def end_of_turn(name: str) -> str:
    """Return the special token that ends an answer in the template, else the tokenizer's."""
    messages = [turn("user", QUESTION), turn("assistant", ANSWER)]
    _, _, after = reference(name, *messages, answer_follows=False).rpartition(ANSWER)
    if name == "glm4moe":
        return "<|user|>"  # the mark that begins the next turn
    found = SPECIAL.findall(after)
    return (found[-1] if name.startswith("cohere2") else found[0]) if found else "<eos>"


def one_bos(name: str, token_ids) -> bool:
    """Return whether the sequence begins as the template says, with one token or none."""
    reader = tokenizer(name)
    writes = reference(name, turn("user", QUESTION)).startswith("<bos>")
    return list(token_ids).count(reader.bos_token_id) == int(writes)


COMMON = {"qwen3", "llama3_1", "gemma3", "deepseekv3", "gptoss"}
"""Templates of the quick tests; all take seconds."""


def test_the_wheel_has_templates():
    assert len(SHIPPED) > 60 and COMMON <= SHIPPED.keys()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in COMMON else pytest.mark.slow)
        for name in sorted(SHIPPED)
    ],
)
def test_rows_in_all_forms(name):
    """All forms of one row give what transformers renders.

    The answer is learned up to the end of the turn, and generation stops there.
    """
    reader = tokenizer(name)
    section = SECTION

    text = reference(name, turn("user", QUESTION))
    for form, value in PROMPTS.items():
        prompt = asked(name, value)
        assert prompt.text == text and one_bos(name, prompt.token_ids), form

    end = end_of_turn(name)
    expected = learned(name, {"messages": [turn("user", QUESTION), turn("assistant", ANSWER)]})
    assert expected.endswith(
        ANSWER + ("<|END_RESPONSE|>" if name.startswith("cohere2") else "") + end
    )
    assert reader.convert_tokens_to_ids(end) in turn_end_ids(section, reader)

    for value in PROMPTS.values():
        assert learned(name, {"input": value, "label": ANSWER}) == expected
        assert (
            learned(name, {"prompt": value, "completion": [turn("gpt", parts(ANSWER))]}) == expected
        )

    assert learned(name, {"input": QUESTION, "label": ANSWER + end}) == expected, (
        "with its end token, rendered beforehand"
    )

    row = {"prompt": QUESTION, "chosen": ANSWER, "rejected": [turn("assistant", OTHER)]}
    pair = pair_maker(PreferenceSection())(RowContext(section, reader), row).columns
    chosen, rejected = (reader.decode(pair[column].token_ids) for column in ("chosen", "rejected"))
    assert chosen.endswith(
        ANSWER[-2:] + expected.rpartition(ANSWER)[2]
    ) and rejected == chosen.replace("7", "8")

    format, agents = turn_format(section, reader)
    request = agents.TurnRequest([turn("user", parts(QUESTION))], agents.BEGINNING)
    sent = format.prompt(Prompt(0, "", []), request)
    assert sent.token_ids == asked(name, QUESTION).token_ids
    between = reader.decode(
        format.tokens(agents.TurnRequest(THIRD), reader.convert_tokens_to_ids(end))
    )
    assert THIRD in between and between.endswith(text.rpartition(QUESTION)[2][-5:])


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_two_turns(name):
    """Each answer is learned up to the end that the template writes, and nothing of the user's."""
    messages = [
        turn("user", QUESTION),
        turn("assistant", ANSWER),
        turn("user", THIRD),
        turn("assistant", OTHER),
    ]
    both = learned(name, {"messages": messages})
    end = end_of_turn(name)
    inner = {"gptoss": "<|end|>", "gptoss_training": "<|end|>"}.get(name, end)
    response = "<|END_RESPONSE|>" if name.startswith("cohere2") else ""
    assert (
        f"{ANSWER}{response}{inner}" in both
        and both.endswith(OTHER + response + end)
        and THIRD not in both
    )
    first = learned(name, {"messages": [*messages[:3], messages[3] | {"weight": 0}]})

    second = learned(
        name, {"messages": [messages[0], messages[1] | {"train": False}, *messages[2:]]}
    )
    assert (
        OTHER not in first
        and ANSWER not in second
        and len(first) + len(second) <= len(both) + len("<eos>")
    )


CALLED = [
    turn("user", QUESTION),
    turn(
        "assistant", None, tool_calls=[{"function": {"name": "add", "arguments": {"a": 6, "b": 1}}}]
    ),
    turn("tool", "7"),
    turn("assistant", ANSWER),
    turn("user", THIRD),
    turn("assistant", OTHER),
]


@pytest.mark.parametrize("last", [2, 4, 6])
def test_turns_end_with_the_mark_of_the_next_one(last):
    """TRL's template for training writes the mark into the turn itself, and marks what is learned."""
    row = {"messages": CALLED[:last]}
    expected = learned("glm4moe_training", row)
    assert learned("glm4moe", row) == expected
    marks = ["<|observation|>", "<|user|>", "<|user|>"][: last // 2]
    assert re.findall(r"<\|(?:user|observation)\|>", expected) == marks
    reader = tokenizer("glm4moe")
    assert set(reader.convert_tokens_to_ids(marks)) <= turn_end_ids(SECTION, reader)


@pytest.mark.parametrize("name", ["qwen3", "glm4moe"])
def test_results_of_calls_in_one_turn_are_rendered_together(name):
    """These templates put successive results into one turn, in data and between an agent's turns."""
    reader = tokenizer(name)
    call = {"function": {"name": "add", "arguments": {"a": 6, "b": 1}}}
    results = [turn("tool", "7"), turn("tool", "8")]
    messages = [
        turn("user", QUESTION),
        turn("assistant", "", tool_calls=[call, call]),
        *results,
        turn("assistant", ANSWER),
    ]
    row = make_example(RowContext(SECTION, reader), {"messages": messages})
    whole = reader.decode([*row.token_ids, *row.columns["label"].token_ids])
    end = end_of_turn(name)
    assert (
        whole.removesuffix(end)
        == reference(name, *messages, answer_follows=False).rpartition(ANSWER)[0] + ANSWER
    )
    format, agents = turn_format(SECTION, reader)
    ended = "<|observation|>" if name == "glm4moe" else end
    between = format.tokens(agents.TurnRequest(results), reader.convert_tokens_to_ids(ended))
    assert reader.decode(between) in whole


TEXT_OF_THOUGHTS = {
    "qwen3": "<think>\nSix and one.\n</think>\n\nIt is 7.<|im_end|>",
    "qwen3_8": "Six and one.\n</think>\n\nIt is 7.<|im_end|>",
    "glm4moe": "\n<think>Six and one.</think>\nIt is 7.<|user|>",
    "gemma4_v5": "<|channel>thought\nSix and one.\n<channel|>It is 7.<turn|>",
    "gptoss": (
        "<|channel|>analysis<|message|>Six and one.<|end|><|start|>assistant<|channel|>final"
        "<|message|>It is 7.<|return|>"
    ),
    "muse_glimmer": (
        " to=self<|message|>Six and one.<|eom|><|start|>assistant to=user<|message|>It is 7.<|eot|>"
    ),
    "llama3": f"{THOUGHT}It is 7.<|eot_id|>",
    "gemma4": f"{THOUGHT}It is 7.<turn|>",
}
"""Template -> what is learned of an answer with thinking: as reasoning_content, where the template
has a place for it, and otherwise as text.
"""


@pytest.mark.parametrize("name", TEXT_OF_THOUGHTS)
def test_thinking_in_the_text_of_an_answer_is_rendered_as_thinking(name):
    said: list[str] = []
    handler = logger.add(said.append, level="WARNING", format="{message}")
    tokenizer.cache_clear()
    rows = [
        {"messages": [turn("user", QUESTION), turn("assistant", THOUGHT + ANSWER)]},
        {"input": QUESTION, "label": THOUGHT + ANSWER},
    ]
    if THOUGHT not in TEXT_OF_THOUGHTS[name]:
        # A generation prompt that opens the thinking leaves its mark out of a response.
        rows.append({"input": QUESTION, "label": THOUGHT.removeprefix("<think>\n") + ANSWER})
        with pytest.raises(ValueError, match="thinking of an answer begins with <think> and has n"):
            learned(name, {"input": QUESTION, "label": "<think>\nSix and"})
        for key in ("reasoning_content", "reasoning", "thinking"):
            answer = turn("assistant", ANSWER, **{key: "Six and one."})
            rows.append({"messages": [turn("user", QUESTION), answer]})
    for row in rows:
        assert learned(name, row) == TEXT_OF_THOUGHTS[name]
    logger.remove(handler)
    warned = ["another form of thinking than <think>" in line for line in said]
    assert warned == [True] * (name == "gemma4")


ANTHROPIC = [
    turn("user", QUESTION),
    turn(
        "assistant",
        [
            {"type": "thinking", "thinking": "Six and one.", "signature": "x"},
            {"type": "tool_use", "id": "call1", "name": "add", "input": {"a": 6, "b": 1}},
        ],
    ),
    turn("user", [{"type": "tool_result", "tool_use_id": "call1", "content": "7"}]),
    turn("assistant", [{"type": "text", "text": ANSWER}]),
]


@pytest.mark.parametrize("name", ["qwen3_8", "glm4moe", "muse_glimmer"])
def test_messages_of_anthropic_are_those_of_openai(name):
    call = {"id": "call1", "function": {"name": "add", "arguments": {"a": 6, "b": 1}}}
    thinks = turn("assistant", None, reasoning_content="Six and one.", tool_calls=[call])
    result = turn("tool", "7", tool_call_id="call1")
    plain = [turn("user", QUESTION), thinks, result, turn("assistant", ANSWER)]
    rows = [{"messages": messages} for messages in (ANTHROPIC, plain)]
    first, second = (make_example(RowContext(SECTION, tokenizer(name)), row) for row in rows)
    assert first == second and "add" in learned(name, rows[0])


@pytest.mark.parametrize("content", ["no file", [{"type": "text", "text": "no file"}], None])
def test_an_error_of_a_tool_is_told_to_the_model(content):
    """Templates have no field for it, so it is text, as errors of our own tools are."""
    block = {"type": "tool_result", "tool_use_id": "a", "content": content, "is_error": True}
    (message,) = as_messages([turn("user", [block])])
    assert message["role"] == "tool" and message["tool_call_id"] == "a"
    assert clean_message(message)["content"] == f"Error: {'no file' if content else ''}"
    (message,) = as_messages([turn("user", [block | {"is_error": False}])])
    assert clean_message(message)["content"] == ("no file" if content else "")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": "a.png"}, "type 'image': media are read with --images_key"),
        (
            {"type": "redacted_thinking", "data": "x"},
            "type 'redacted_thinking': parts are texts, m",
        ),
        ({"type": "document", "source": {}}, "type 'document': parts are texts, media, or Anthr"),
    ],
)
def test_parts_that_nothing_reads_are_named(part, message):
    with pytest.raises(ValueError, match=message):
        asked("qwen3", [turn("user", [{"type": "text", "text": QUESTION}, part])])


EMPTY_THOUGHTS = {
    "qwen3": "<think>\n\n</think>\n\n",
    "qwen3_5_think": "\n</think>\n\n",
    "glm4moe": "\n<think></think>\n",
    "nemotron_3_nano": "</think>",
    "qwen2_5": "",
}
"""Template -> the thinking that it writes before an answer without one."""


@pytest.mark.parametrize("name", EMPTY_THOUGHTS)
def test_an_empty_thinking_can_be_left_out_of_what_is_learned(name):
    """The tokens are the same, and an answer that thinks is learned whole."""
    without = DataSection(
        apply_chat_template=True, prompt_max_len=100_000, learn_empty_thinking=False
    )
    row = {"messages": [turn("user", QUESTION), turn("assistant", ANSWER)]}
    assert learned(name, row) == EMPTY_THOUGHTS[name] + ANSWER + end_of_turn(name)
    assert learned(name, row, without) == ANSWER + end_of_turn(name)
    rows = [make_example(RowContext(each, tokenizer(name)), row) for each in (SECTION, without)]
    whole = [[*each.token_ids, *each.columns["label"].token_ids] for each in rows]
    assert whole[0] == whole[1]

    row = {"messages": [turn("user", QUESTION), turn("assistant", THOUGHT + ANSWER)]}
    assert learned(name, row, without) == learned(name, row)
