"""Tokenization of multi-turn conversations, in which the turns of the assistant are learned."""

import re
from itertools import accumulate, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lightrft.config.sections import DataSection
from lightrft.data.prompts import render_chat, template_variables
from lightrft.types import Answer, TokenIds

Message = dict[str, Any]
Text = tuple[str, bool]
"""Part of a conversation, with True if it is learned."""
ROLES = {
    "human": "user", "user": "user", "system": "system", "tool": "tool", "observation": "tool",
    "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "assistant": "assistant",
}  # fmt: skip
"""Names in ShareGPT's `from` -> roles of chat templates."""
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Tag with which a chat template marks the turns of the assistant."""


def as_messages(value: Any) -> list[Message] | None:
    """Return the chat messages of a column, also in ShareGPT's format (`from`, `value`); None if it is no list of messages.

    Raise ValueError for an unknown `from`.
    """
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        return None
    return [_as_message(message) if "from" in message and "role" not in message else message for message in value]


def _as_message(turn: dict[str, Any]) -> Message:
    if turn["from"] not in ROLES:
        raise ValueError(f"the turn has the role {turn['from']!r}; known roles are {', '.join(ROLES)}")
    return {"role": ROLES[turn["from"]], "content": turn.get("value")}


def is_answer(message: Message) -> bool:
    """Return True if the message is from the assistant."""
    return message.get("role") == "assistant"


def conversation_tokens(
    section: DataSection, tokenizer: PreTrainedTokenizerBase, messages: list[Message], num_turns: int
) -> tuple[str, list[int], Answer]:
    """Return text and tokens before the first learned turn, and the Answer from there on.

    The last `num_turns` turns of the assistant are learned, each up to its end token; with `learned_turns` "last" only one is.
    Tokens are those of the whole text. Raise ValueError for a message without content, and if the turns cannot be located in
    the text.
    """
    for number, message in enumerate(messages, 1):
        content, is_empty = message.get("content"), not message.get("content") and not message.get("tool_calls")
        if is_empty and (content is None or is_answer(message)):
            raise ValueError(f"message {number} of {len(messages)}, of role {message.get('role')!r}, has no content")
    num_turns = 1 if section.learned_turns == "last" else num_turns
    marked = MARKED.search(tokenizer.get_chat_template())
    texts = (_marked_texts if marked else _rendered_texts)(section, tokenizer, messages, num_turns)
    token_ids: list[int] = []
    learned: list[bool] = []
    eos = tokenizer.eos_token_id
    for (_, is_learned), tokens in zip(texts, _tokens([text for text, _ in texts], tokenizer), strict=True):
        num_learned = len(tokens) - tokens[::-1].index(eos) if eos in tokens else len(tokens)
        token_ids += tokens
        learned += [is_learned and place < num_learned for place in range(len(tokens))]
    for place in range(1, len(token_ids)):  # a template may mark a turn without its end token
        learned[place] |= learned[place - 1] and token_ids[place] == eos != token_ids[place - 1]
    if True not in learned[1:] or learned[0]:
        raise ValueError("the chat template renders an empty prompt, or an empty answer")
    first, end = learned.index(True), len(learned) - learned[::-1].index(True)
    ending = [] if token_ids[end - 1] == eos else [eos]
    answer = Answer(TokenIds(token_ids[first:end] + ending), learned[first:end] + [True] * len(ending))
    return texts[0][0], token_ids[:first], answer


def _marked_texts(
    section: DataSection, tokenizer: PreTrainedTokenizerBase, messages: list[Message], num_turns: int
) -> list[Text]:
    """Split at the turns of the assistant that the chat template marks. Raise ValueError if it does not mark all of them."""
    variables = tokenizer.special_tokens_map | template_variables(section)
    template = tokenizer.get_chat_template()
    try:
        (text,), (spans,) = render_jinja_template(
            [messages], chat_template=template, return_assistant_tokens_mask=True, **variables
        )
    except Exception as error:  # a template is a program and raises its own errors
        raise ValueError(f"the chat template rejects it ({type(error).__name__}: {error})") from error
    num_answers = sum(map(is_answer, messages))
    if len(spans) != num_answers:
        raise ValueError(f"the chat template marks {len(spans)} turns with {{% generation %}}, the assistant has {num_answers}")
    return _cut(text, spans[-num_turns:])


def _rendered_texts(
    section: DataSection, tokenizer: PreTrainedTokenizerBase, messages: list[Message], num_turns: int
) -> list[Text]:
    """Split at the ends of the rendered messages before and up to each turn.

    Raise ValueError if these are no prefixes of the whole text.
    """
    turns = [place for place, message in enumerate(messages) if is_answer(message)][-num_turns:]
    text = render_chat(section, tokenizer, messages, answer_follows=False)
    spans = []
    for turn in turns:
        before = render_chat(section, tokenizer, messages[:turn], answer_follows=True)
        after = render_chat(section, tokenizer, messages[: turn + 1], answer_follows=False)
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(_disagreement(turn, messages))
        spans.append((len(before), len(after)))
    return _cut(text, spans)


def _disagreement(turn: int, messages: list[Message]) -> str:
    if any(map(is_answer, messages[turn + 1 :])):
        return (
            f"the chat template renders the answer in message {turn + 1} of {len(messages)} differently when other messages "
            "follow, for example without its thinking; use --learned_turns last to train only on the last answer, or use one "
            "row for each answer"
        )
    return (
        f"the chat template does not render the answer in message {turn + 1} of {len(messages)} after its generation prompt; "
        "use a template that does, or one that marks answers with {% generation %}, or set --chat_template_kwargs"
    )


def _cut(text: str, spans: list[tuple[int, int]]) -> list[Text]:
    """Split the text at the spans; the parts inside of spans are learned."""
    borders = [0, *(border for span in spans for border in span), len(text)]
    return [(text[start:end], place % 2 == 1) for place, (start, end) in enumerate(pairwise(borders))]


def _tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of consecutive texts as in the whole text, or of each text alone if a token would cross a boundary."""

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    parts, joined = [tokens(text) for text in texts], tokens("".join(texts))
    if [token for part in parts for token in part] == joined:
        return parts
    beginnings = [tokens(beginning) for beginning in accumulate(texts)]
    if any(joined[: len(beginning)] != beginning for beginning in beginnings):
        return parts
    return [joined[start:end] for start, end in pairwise([0, *map(len, beginnings)])]
