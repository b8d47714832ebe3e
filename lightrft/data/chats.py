"""Tokenize conversations whose assistant turns are learned."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from lightrft.config.sections import DataSection
from lightrft.core.samples import Answer, TokenIds
from lightrft.data.rendering.messages import (
    THINKING,
    THOUGHTS,
    Message,
    is_answer,
    is_blank,
    weight_of,
)
from lightrft.data.rendering.template import (
    WORD,
    ChatTemplate,
    answer_pieces,
    contains,
    rejection,
    texts_of,
)
from lightrft.data.rendering.tokens import consecutive_tokens, without_ends

Text = tuple[str, bool]
"""Part of a conversation, with True if it is learned."""
Span = tuple[int, int]
"""Beginning and end of a learned turn in the whole text."""
OPENED = re.compile(
    rf"(?:{'|'.join(map(re.escape, THINKING))})\s*"
    rf"(?:(?:{'|'.join(map(re.escape, THINKING.values()))})\s*)?$"
)
"""Thinking that a generation prompt opens at the end, or closes at once."""
EMPTY = re.compile(
    "|".join(rf"\s*({re.escape(a)})?\s*{re.escape(b)}\s*" for a, b in THINKING.items())
)
"""Thinking without a text, which a generation prompt may have opened."""
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Tag that marks the turns of the assistant in a chat template."""


@dataclass(frozen=True)
class Conversation:
    """The messages of a row, and what else the columns say about how to render them."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)

    def render(
        self, template: ChatTemplate, *, answer_follows: bool, end: int | None = None
    ) -> str:
        """Render the messages before the index `end`, or all."""
        options = {"tools": self.tools, "variables": self.variables}
        return template.render(self.messages[:end], answer_follows=answer_follows, **options)

    def for_template(self, template: ChatTemplate) -> "Conversation":
        """Return the conversation with answers as the template takes them.

        It writes its own end tokens, and thinking goes to the key where it looks for that.
        """
        messages = [
            _for_template(message, template) if is_answer(message) else message
            for message in self.messages
        ]
        return Conversation(messages, self.tools, self.variables)


def _for_template(message: Message, template: ChatTemplate) -> Message:
    written = {name: message[name] for name in THOUGHTS if message.get(name)}
    text = message["content"]
    if isinstance(text, str):
        text = without_ends(text, template.ends)
        # A generation prompt may have opened the thinking.
        begins = (
            begin
            for begin, end in THINKING.items()
            if text.lstrip().startswith(begin) or begin not in text.partition(end)[0] != text
        )
        begin = next(begins, "")
        if begin and not written:
            thoughts, closed, rest = text.lstrip().removeprefix(begin).partition(THINKING[begin])
            if template.thoughts and not closed:
                raise ValueError(f"the thinking of an answer begins with {begin} and has no end")
            if not template.reads_thoughts(begin):
                written = {"": thoughts.strip()}
                text = rest.lstrip()

    message = message | {"content": text}
    # The template may know another name than the row.
    if written and template.thoughts and not written.keys() & template.thoughts.keys():
        message = {name: value for name, value in message.items() if name not in written}
        message[next(iter(template.thoughts))] = next(iter(written.values()))
    return message


def conversation_tokens(
    template: ChatTemplate, conversation: Conversation, num_turns: int, section: DataSection
) -> tuple[str, list[int], Answer]:
    """Return text and tokens before the first learned turn, and the Answer from there on.

    Among the last `num_turns` turns of the assistant, each whose weight is not 0 is learned up to
    the end token; with --learned_turns last only the last one. Without --learn_empty_thinking a
    turn is learned after an empty thinking. Tokens are the same as in the whole text.
    Raise ValueError for a message without content, and if an answer is not where the template
    writes it.
    """
    conversation = conversation.for_template(template)
    messages = conversation.messages
    only_last = section.learned_turns == "last" or section.expand_turns
    turns = _learned_turns(messages, 1 if only_last else num_turns)
    texts = _texts(template, conversation, turns, section)

    token_ids: list[int] = []
    learned: list[bool] = []
    # An engine's prompt ends where an answer begins, so no token may cross that border.
    pieces = consecutive_tokens(template.tokenizer, [text for text, _ in texts])
    for (_, is_learned), tokens in zip(texts, pieces, strict=True):
        token_ids += tokens
        learned += [is_learned] * len(tokens)
    if True not in learned[1:] or learned[0]:
        raise ValueError("the chat template renders an empty prompt, or an empty answer")

    first = learned.index(True)
    end = len(learned) - learned[::-1].index(True)
    tokenizer = template.tokenizer
    closing = template.closing.token if template.closing.begins_next else tokenizer.eos_token
    if template.closing.begins_next and messages[turns[-1]].get("tool_calls"):
        closing = template.call_end or closing
    ended = token_ids[end - 1] in template.end_token_ids
    ending = [] if ended else [tokenizer.convert_tokens_to_ids(closing)]
    answer = Answer(
        TokenIds(token_ids[first:end] + ending), learned[first:end] + [True] * len(ending)
    )
    return texts[0][0], token_ids[:first], answer


def _learned_turns(messages: Sequence[Message], num_turns: int) -> list[int]:
    """Return the indices of the learned turns.

    Raise ValueError for turns that cannot be learned.
    """
    for number, message in enumerate(messages, 1):
        is_empty = is_blank(str(message["content"] or "")) and not message.get("tool_calls")
        if is_answer(message) and is_empty:
            raise ValueError(
                f"message {number} of {len(messages)}, of role 'assistant', has no content"
            )
        if weight_of(message) and not is_answer(message):
            raise ValueError(
                f"message {number} of {len(messages)}, of role {message['role']!r}, shall be"
                " learned (weight, train or loss), but only turns of the assistant are"
            )

    # The last turns are chosen first: --learned_turns last of a row whose last turn has the weight
    # 0 must not learn an earlier one.
    turns = [index for index, message in enumerate(messages) if is_answer(message)][-num_turns:]
    turns = [turn for turn in turns if weight_of(messages[turn]) is not False]
    if not turns:
        raise ValueError("no turn is learned: the weight of each is 0")
    if turns[0] == 0:
        raise ValueError(
            "message 1 is a turn of the assistant with nothing before it, which cannot be learned:"
            " give it the weight 0, or remove it"
        )
    return turns


def _texts(
    template: ChatTemplate, conversation: Conversation, turns: list[int], section: DataSection
) -> list[Text]:
    """Split the rendered conversation at the learned turns.

    Raise ValueError if an answer is not in its turn.
    """
    messages = conversation.messages
    text = conversation.render(template, answer_follows=False)

    # A template with {% generation %} says itself where answers stand.
    marked = MARKED.search(template.tokenizer.get_chat_template())

    marks = _marks(template, conversation) if marked else {}
    spans = []
    for turn in turns:
        before = conversation.render(template, answer_follows=True, end=turn)
        start = _start_of_turn(before, text)
        # A mark may include the header that a generation prompt ends with, which is not learned.
        if turn in marks:
            mark, _ = marks[turn]
            header = max(_repeated(each, text[mark:]) for each in (before, OPENED.sub("", before)))
            start = max(start, mark) if start >= 0 else mark + header
            end = _end_of_mark(template, text, marks[turn])
        else:
            end = _end_of_turn(template, conversation, turn, text)

        if turn == len(messages) - 1 and start < len(before) and (start >= 0 or not spans):
            if continued := _continued(template, messages, before):
                return [*_cut(before, spans), (continued, True)]
        if not 0 <= start <= end or not contains(text[start:end], answer_pieces(messages[turn])):
            raise ValueError(_disagreement(template, turn, messages))
        empty = None if section.learn_empty_thinking else EMPTY.match(text, start)
        spans.append((empty.end() if empty else start, end))

        if turn == len(messages) - 1 and start < len(before) and not marks:
            template.warn(
                "the generation prompt of the chat template opens a thinking that its answers do"
                " not have: they are learned as it renders them, after a prompt without it; see"
                " --chat_template_kwargs"
            )

    return _cut(text, spans)


def _start_of_turn(before: str, text: str) -> int:
    """Return the end of the generation prompt in the whole text; -1 if it is not there.

    The thinking that a generation prompt opens may be missing there, where an answer has none.
    """
    opened = before.rstrip() if before.rstrip().endswith(tuple(THINKING)) else before
    starts = (before, opened, OPENED.sub("", before))
    return next((len(start) for start in starts if text.startswith(start)), -1)


def _repeated(before: str, text: str) -> int:
    """Return the length of the header if a text repeats the end of a generation prompt."""
    lengths = range(min(len(before), len(text)), 0, -1)
    length = next((length for length in lengths if before.endswith(text[:length])), 0)
    return length if text[:length].strip() else 0


def _marks(template: ChatTemplate, conversation: Conversation) -> dict[int, Span]:
    """Return the turns that the template marks.

    Raise ValueError if it does not mark all of them.
    """
    tokenizer = template.tokenizer
    messages, variables = template.formed(
        conversation.messages, conversation.tools, conversation.variables
    )
    try:
        (text,), (marks,) = render_jinja_template(
            [messages],
            chat_template=tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map | variables,
        )
    except Exception as error:  # a template is a program and raises its own errors
        raise rejection(error) from error

    spans: list[Span] = []
    for start, end in marks:
        if spans and not text[spans[-1][1] : start].strip():  # it marks an end token by itself
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))

    answers = [index for index, message in enumerate(conversation.messages) if is_answer(message)]
    if len(spans) != len(answers):
        raise ValueError(
            f"the chat template marks {len(spans)} turns with {{% generation %}}, the assistant has"
            f" {len(answers)}"
        )

    return dict(zip(answers, spans, strict=True))


def _end_of_mark(template: ChatTemplate, text: str, mark: Span) -> int:
    """Return the index after the end token of a marked turn, inside of the mark or behind it."""
    start, end = mark
    closings = {
        template.closing.last.strip(),
        template.closing.inner.strip(),
        template.call_end,
    } - {""}
    ends = [found + len(each) for each in closings if (found := text.rfind(each, start, end)) >= 0]
    return max(ends) if ends else _with_closing(text, end, template)


def _end_of_turn(template: ChatTemplate, conversation: Conversation, turn: int, text: str) -> int:
    """Return the index after the end token of a turn in the whole text; -1 if it is not there.

    Another answer instead of it shows what follows it. Where the template does not allow that, as
    for calls whose results follow, the turn is rendered as the last one.
    """
    messages = conversation.messages

    # Only text: calls and thinking would bring ends of their own.
    other = messages[turn] | {"content": WORD}
    for name in ("tool_calls", *THOUGHTS):
        other.pop(name, None)
    changed = Conversation(
        [*messages[:turn], other, *messages[turn + 1 :]], conversation.tools, conversation.variables
    )
    try:
        after = changed.render(template, answer_follows=False).rpartition(WORD)[2]
    except ValueError:
        after = None
    if after is not None and text.endswith(after):
        return _with_closing(text, len(text) - len(after), template)
    last = conversation.render(template, answer_follows=False, end=turn + 1).rstrip()
    return _with_closing(text, len(last), template) if text.startswith(last) else -1


def _with_closing(text: str, end: int, template: ChatTemplate) -> int:
    """Return the index after the end token that follows an answer, or the end of the answer."""
    closings = {template.closing.last, template.closing.inner, template.call_end} - {""}
    return end + max(
        (len(closing) for closing in closings if text.startswith(closing, end)), default=0
    )


def _continued(template: ChatTemplate, messages: list[Message], before: str) -> str:
    """Return the last answer as it follows a generation prompt that opens its thinking.

    The template cuts the thinking. Empty if the answer has none, or the prompt opens none.
    """
    answer = "".join(texts_of(messages[-1])).strip()
    begin = next((begin for begin in THINKING if before.rstrip().endswith(begin)), "")
    if not begin or THINKING[begin] not in answer or messages[-1].get("tool_calls"):
        return ""
    opened = before[before.rindex(begin) :]
    return answer.removeprefix(opened).removeprefix(begin) + template.closing.last


def _disagreement(template: ChatTemplate, turn: int, messages: Sequence[Message]) -> str:
    where = f"message {turn + 1} of {len(messages)}"
    if not template.thoughts and any(messages[turn].get(name) for name in THOUGHTS):
        return (
            f"the chat template leaves out the thinking of {where}: use a template that writes it,"
            f" write it into the text of the answer, or remove it ({', '.join(THOUGHTS)})"
        )

    if any(map(is_answer, messages[turn + 1 :])):
        return (
            f"the chat template renders the answer in {where} differently when other messages"
            " follow, for example without its thinking; use --learned_turns last to train only on"
            " the last answer, or in SFT --expand_turns for an example of each answer"
        )

    return (
        f"the chat template does not render the answer in {where} after its generation prompt; use"
        " a template that does, or one that marks answers with {% generation %}, or set"
        " --chat_template_kwargs"
    )


def _cut(text: str, spans: list[Span]) -> list[Text]:
    """Split the text at the spans; the texts inside of spans are learned."""
    borders = [0, *(border for span in spans for border in span), len(text)]
    return [
        (text[start:end], index % 2 == 1) for index, (start, end) in enumerate(pairwise(borders))
    ]
