"""Which tokens are learned, for each chat template in TRL's wheel, against TRL's own marks.

The wheel has most templates a second time, with the turns of the assistant marked for training. The
masks that transformers computes from these marks are the reference. The others have a rule of two
regular expressions. A wrong mask would learn what others say, or never learn to stop.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from lightrft.data.conversations import make_example, row_of_each_turn
from lightrft.data.prompts import RowContext
from trl_templates import NEEDS_PARTS, SECTION, SHIPPED, THOUGHT, tokenizer, turn

pytestmark = pytest.mark.skipif(not SHIPPED, reason="TRL, which has the templates, is missing")

ORIGINAL = sorted(name for name in SHIPPED if not name.endswith("_training"))
MARKED = {name: f"{name}_training" for name in ORIGINAL if f"{name}_training" in SHIPPED}
MARKED |= {name: name for name in ORIGINAL if name.startswith("lfm2_2_5")}
"""Template -> the one that marks the turns of the assistant; three do so themselves."""
OF_LLAMA = (r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n", r"<\|eot_id\|>")
OF_GEMMA = (
    r"<\|turn>model\n|<tool_response\|>(?!<\|tool_response>)",
    r"<turn\|>|<\|tool_response>",
)
RULES = {name: OF_LLAMA if "llama" in name else OF_GEMMA for name in ORIGINAL if name not in MARKED}
"""Template without marks -> what a turn begins after, and what it ends with."""
KEEPS_THINKING = {"qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6"}
"""Templates that TRL has changed so that earlier turns keep their thinking, also an empty one."""
EMPTY = "<think>\n\n</think>\n\n"

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Sums up.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ASK, ASK_AGAIN = turn("user", "What is 6+1?"), turn("user", "And 7+1?")
SEVEN, EIGHT = turn("assistant", "It is 7."), turn("assistant", "It is 8.")
THINKS = SEVEN | {"reasoning_content": "Six and one."}
THINKS_AGAIN = EIGHT | {"reasoning_content": "Seven and one."}
RESULT = turn("tool", "Sum: 7", name="add")


def calls(*numbers: int, **others) -> dict:
    each = [
        {"type": "function", "function": {"name": "add", "arguments": {"a": number}}}
        for number in numbers
    ]
    return turn("assistant", "", tool_calls=each, **others)


CALLS = calls(6001)
CONVERSATIONS = {
    "one turn": [ASK, SEVEN],
    "two turns": [ASK, SEVEN, ASK_AGAIN, EIGHT],
    "system": [turn("system", "Be brief."), ASK, SEVEN],
    "call": [ASK, CALLS],
    "call and answer": [ASK, CALLS, RESULT, SEVEN],
    "two calls": [ASK, calls(6001, 7001), RESULT, turn("tool", "Sum: 8", name="add"), SEVEN],
    "call and two answers": [ASK, CALLS, RESULT, SEVEN, ASK_AGAIN, EIGHT],
    "thinking": [ASK, THINKS],
    "thinking twice": [ASK, THINKS, ASK_AGAIN, THINKS_AGAIN],
    "thinking and call": [ASK, calls(6001, reasoning_content="So I add."), RESULT, THINKS],
    "empty thinking": [ASK, turn("assistant", EMPTY + "It is 7.")],
    "thinking in the text": [ASK, turn("assistant", THOUGHT + "It is 7.")],
    "thinking in the last text": [
        ASK,
        SEVEN,
        ASK_AGAIN,
        turn("assistant", THOUGHT.replace("Six", "Seven") + "It is 8."),
    ],
}


@dataclass(frozen=True)
class Learned:
    """A rendered conversation, with the learned texts between other texts."""

    texts: tuple[str, ...]
    """Texts in order; every second one is learned."""

    @property
    def turns(self) -> tuple[str, ...]:
        return self.texts[1::2]

    @property
    def up_to_the_end(self) -> tuple[str, ...]:
        """Return the texts without the one after the last turn, which no example contains."""
        return self.texts[: len(self.texts) // 2 * 2]

    @property
    def last_turn(self) -> "Learned":
        """Return the conversation with only the last turn learned."""
        *before, last = self.up_to_the_end
        return Learned(("".join(before), last))


def of_masks(name: str, token_ids: Sequence[int], masks: Sequence[int]) -> Learned:
    borders = [0]
    for place in range(1, len(masks)):
        if masks[place] != masks[place - 1]:
            borders.append(place)
    pairs = zip(borders, [*borders[1:], len(masks)], strict=True)
    return Learned(tuple(tokenizer(name).decode(token_ids[start:end]) for start, end in pairs))


def ours(name: str, messages: Sequence[dict], tools: Sequence[dict], **options) -> list[Learned]:
    """Return the examples that we make of a conversation."""
    section = replace(SECTION, **options)
    row = {"messages": messages} | ({"tools": tools} if tools else {})
    context = RowContext(section, tokenizer(name))
    examples = [make_example(context, part) for part in row_of_each_turn(section, row)]
    return [
        of_masks(
            name,
            [*each.token_ids, *each.columns["label"].token_ids],
            [False] * len(each.token_ids) + each.columns["label"].learned,
        )
        for each in examples
    ]


def plain(name: str, messages: Sequence[dict]) -> list[dict]:
    """Return messages as the authors of the template write them."""
    written = []
    for message in messages:
        if thoughts := message.get("reasoning_content"):
            message = message | {"thinking": thoughts, "reasoning": thoughts}
        if name.startswith(NEEDS_PARTS):
            message = message | {"content": [{"type": "text", "text": message["content"]}]}
        written.append(message)
    return written


def rendered(name: str, messages: Sequence[dict], tools: Sequence[dict], **options) -> str | None:
    """Return the text that transformers renders; None if the template rejects the messages."""
    for written in (plain(name, messages), with_json_arguments(plain(name, messages))):
        with suppress(Exception):  # a template is a program and raises its own errors
            return tokenizer(name).apply_chat_template(
                written, tools=tools or None, tokenize=False, **options
            )
    return None


def with_json_arguments(messages: Sequence[dict]) -> list[dict]:
    """Return messages whose calls have arguments that are JSON text, as some templates take them."""
    messages = deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages


def theirs(name: str, messages: Sequence[dict], tools: Sequence[dict]) -> Learned:
    """Return what TRL marks, or what the rule says, apart from what no model generates.

    That is what the generation prompt ends with, and what follows the end of a turn.
    """
    if name in RULES:
        text = rendered(name, messages, tools)
        begin, end = RULES[name]
        found = re.finditer(rf"(?:{begin})(.*?(?:{end}))", text, flags=re.DOTALL)
        borders = [0, *(border for turn in found for border in turn.span(1)), len(text)]
        return Learned(tuple(text[start:end] for start, end in pairwise(borders)))

    marked = tokenizer(MARKED[name]).apply_chat_template(
        plain(name, messages),
        tools=tools or None,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    texts = list(of_masks(name, marked["input_ids"], marked["assistant_masks"]).texts)
    texts += [""] * (len(texts) % 2 == 0)
    prompt = rendered(name, [ASK], [], add_generation_prompt=True)
    # An answer may lack the thinking that the prompt opens, or the line break after its mark.
    prompts = (prompt, prompt.rstrip(), prompt.removesuffix("<think>\n"))
    for place in range(1, len(texts) - 1, 2):
        text = texts[place]
        counts = range(len(text), -1, -1)
        count = next(n for n in counts if any(each.endswith(text[:n]) for each in prompts))
        turn = text[count:].removesuffix("\n<eos>").rstrip()
        texts[place - 1] += text[:count]
        texts[place] = turn
        texts[place + 1] = text[count + len(turn) :] + texts[place + 1]
    if name == "diffusion_gemma":
        texts = as_gemma_stops(texts)
    return Learned(tuple(texts))


def as_gemma_stops(texts: list[str]) -> list[str]:
    """Return the texts with the borders where the model stops and goes on.

    A turn of calls ends when the model writes <|tool_response>, as in Gemma 4. The generation prompt
    after a result has no header, so that the model writes the one that the template has there.
    """
    for place in range(1, len(texts) - 1, 2):
        after = texts[place + 1]
        if after.startswith("<|tool_response>"):
            texts[place] += "<|tool_response>"
            texts[place + 1] = after.removeprefix("<|tool_response>")
        if texts[place - 1].endswith("<tool_response|><|turn>model\n"):
            texts[place - 1] = texts[place - 1].removesuffix("<|turn>model\n")
            texts[place] = "<|turn>model\n" + texts[place]
    return texts


def thinks(name: str) -> bool:
    """Return whether the template writes the thinking of an answer that it has apart."""
    return "Six and one." in (rendered(name, [ASK, THINKS], []) or "")


def squeezed(texts: Sequence[str]) -> list[str]:
    return ["".join(text.split()) for text in texts]


def moved(messages: Sequence[dict]) -> list[dict]:
    """Return messages whose last one has its thinking apart."""
    thoughts, _, answer = messages[-1]["content"].removeprefix("<think>").partition("</think>")
    others = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thoughts.strip())
    return [*messages[:-1], turn("assistant", answer.strip(), **others)]


REASONS = {
    "rejects": "the chat template rejects it .*; change the row, or use another template",
    "tools": "does not describe the tool add .*: use a template that does, or rows without tools",
    "calls": "leaves out the tool calls of message 2 of .: use a template that writes them",
    "thinking": "leaves out the thinking of message . of .: use a template that writes it",
    "earlier turns": "differently when other messages follow.*--expand_turns for an example of each",
}
"""What a template does to a conversation -> the error of the row."""


def lost(name: str, messages: Sequence[dict], tools: Sequence[dict]) -> str:
    """Return what the template does so that the conversation cannot be learned; empty if nothing."""
    text = rendered(name, messages, tools)
    if text is None:
        return "rejects"
    if tools and "Sums up." not in text:
        return "tools"
    numbers = [
        call["function"]["arguments"]["a"]
        for message in messages
        for call in message.get("tool_calls", ())
    ]
    if not all(str(number) in text for number in numbers):
        return "calls"

    answers = [end for end, message in enumerate(messages, 1) if message["role"] == "assistant"]
    thoughts = {end: messages[end - 1].get("reasoning_content", "") for end in answers}
    for end in answers:
        if thoughts[end] not in rendered(name, messages[:end], tools):
            return "thinking"
    for end in answers:
        before = rendered(name, messages[: end - 1], tools, add_generation_prompt=True)
        before = re.sub(r"<think>\s*(</think>\s*)?$", "", before)
        if thoughts[end] not in text or not text.startswith(before):
            return "earlier turns"
    return ""


@pytest.mark.parametrize("name", ORIGINAL)
@pytest.mark.parametrize("title", CONVERSATIONS)
def test_what_is_learned(name, title):
    messages = CONVERSATIONS[title]
    tools = [ADD] if any("tool_calls" in message for message in messages) else []
    reason = lost(name, messages, tools)
    if reason:
        with pytest.raises(ValueError, match=REASONS[reason]):
            ours(name, messages, tools)
    elif "text" in title or "empty" in title:
        check_thinking(name, *ours(name, messages, tools), messages)
    else:
        check(name, *ours(name, messages, tools), theirs(name, messages, tools))


@pytest.mark.parametrize("name", ORIGINAL)
def test_each_turn_is_an_example(name):
    """With --expand_turns each is learned as in the conversation that ends with it."""
    for title in ("two turns", "call and two answers", "thinking twice"):
        messages = CONVERSATIONS[title]
        tools = [ADD] if title.startswith("call") else []
        if lost(name, messages, tools) not in ("", "earlier turns"):
            continue
        ends = [end for end, message in enumerate(messages, 1) if message["role"] == "assistant"]
        examples = ours(name, messages, tools, expand_turns=True)
        for end, example in zip(ends, examples, strict=True):
            check(name, example, theirs(name, messages[:end], tools).last_turn)
            whole = "".join(example.texts)
            if name == "glm4moe":  # a turn ends with the mark of the next one
                whole = whole.removesuffix("<|user|>").removesuffix("<|observation|>")
            assert rendered(name, messages[:end], tools).startswith(whole)


def check(name: str, found: Learned, expected: Learned) -> None:
    """Fail if a conversation has another text, or other learned tokens in it."""
    if name in KEEPS_THINKING:
        for turns in zip(found.turns, expected.turns, strict=True):
            assert turns[0] in (turns[1], re.sub(r"^(<think>\n)?\n</think>\n\n", "", turns[1]))
    else:
        assert found.up_to_the_end == expected.up_to_the_end


def check_thinking(name: str, found: Learned, messages: Sequence[dict]) -> None:
    """Fail if thinking in the text of an answer is learned otherwise than the template writes it.

    That is apart from the text if the template has a place for it. White space may differ there.
    """
    if name == "deepseekv3":  # TRL's template cuts the thinking
        thought = messages[-1]["content"].removeprefix("<think>\n")
        assert found.turns[-1] == f"{thought}<｜end▁of▁sentence｜>"
        return
    literal = theirs(name, messages, [])
    if not thinks(name):
        assert found.up_to_the_end == literal.up_to_the_end
        return
    apart = theirs(name, moved(messages), [])
    texts = [rendered(name, each, []) for each in (messages, moved(messages))]
    allowed = [squeezed(apart.turns)]
    if squeezed(texts)[0] == squeezed(texts)[1] or messages[-1]["content"].startswith(EMPTY):
        allowed.append(squeezed(literal.turns))
    if name in KEEPS_THINKING:
        allowed = [
            [re.sub("^(<think>)?</think>", "", each) for each in turns[:-1]] + turns[-1:]
            for turns in allowed
        ]
    assert squeezed(found.turns) in allowed


def test_the_wheel_has_templates():
    assert len(ORIGINAL) > 40 and len(MARKED) > 30 and RULES.keys() | MARKED.keys() == {*ORIGINAL}
