"""Render the chat template of a tokenizer, and check that nothing of the messages is lost.

A template is a program. It may skip a role that it does not know, print a list as Python does, or
ignore tools, all without a word. So what it does is found out by rendering a few messages, once,
and what it has rendered is searched for the text of each message.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from loguru import logger
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.config.sections import DataSection
from lightrft.config.tables import table
from lightrft.config.values import JSONObject
from lightrft.data.readers import is_first_rank
from lightrft.data.rendering.messages import (
    THINKING,
    THINKING_MARKS,
    THOUGHTS,
    WEIGHT_KEYS,
    Message,
    is_answer,
    without_null_arguments,
)

WORD = "\u2402word\u2403"
THOUGHT = "\u2402thought\u2403"
"""Texts that no template contains."""
QUESTION = {"role": "user", "content": WORD + "?"}
CALL, TOOL = (table("data/rendering/probes")[name] for name in ("call", "tool"))
"""A call, and the tool that it calls."""
ARGUMENT = CALL["function"]["arguments"]["word"]
MAX_SHAPES = 4096
"""How many kinds of conversations are remembered as rendered completely."""


def template_variables(section: DataSection) -> dict[str, Any]:
    """Return the variables of --chat_template_kwargs."""
    return json.loads(section.chat_template_kwargs or "{}")


def chat_template(section: DataSection, tokenizer: Tokenizer) -> "ChatTemplate":
    """Return the tokenizer's chat template with the run's variables."""
    source = str(tokenizer.chat_template)
    return _chat_template(
        tokenizer, source, section.chat_template_kwargs, section.chat_template_date
    )


def turn_end_ids(section: DataSection, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a response, as the tokenizer and the chat template say."""
    if section.apply_chat_template and tokenizer.chat_template:
        return chat_template(section, tokenizer).end_token_ids
    return frozenset({tokenizer.eos_token_id} - {None})


@lru_cache(maxsize=8)
def _chat_template(
    tokenizer: Tokenizer, source: str, variables: JSONObject, date: str
) -> "ChatTemplate":
    variables = template_variables(DataSection(chat_template_kwargs=variables))
    if date:
        # the templates' function that writes the present date
        variables = {"strftime_now": datetime.fromisoformat(date).strftime} | variables
    return ChatTemplate(tokenizer, variables)


@dataclass(frozen=True)
class Closing:
    """The end of an assistant turn in a template."""

    last: str
    """Text from the answer to the end token of the last turn; empty if the template has none."""
    inner: str
    """The same for a turn that others follow."""
    token: str
    """The end token of the last turn."""
    begins_next: bool = False
    """True if a turn ends where the token begins the next one, so that the last turn lacks it."""


@dataclass
class ChatTemplate:
    """A tokenizer's chat template with the run's variables, and what it was found to do."""

    tokenizer: Tokenizer
    variables: dict[str, Any]
    """Variables of the run, with the tools."""
    _complete: set[Any] = field(default_factory=set, repr=False)
    """Kinds of conversations that the template is known to render completely."""
    _reads: dict[str, bool] = field(default_factory=dict, repr=False)

    def render(
        self,
        messages: Sequence[Message],
        *,
        answer_follows: bool,
        tools: Sequence[dict[str, Any]] = (),
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Render cleaned messages, with a generation prompt if an answer follows.

        `tools` are described in addition to the run's, and `variables` replace the run's. Raise
        ValueError if the template fails, or does not render everything.
        """
        variables = self.variables | (variables or {})
        tools = [*(self.variables.get("tools") or []), *tools]
        options = {
            "answer_follows": answer_follows,
            "variables": variables | {"tools": tools or None},
        }
        text = self._render(messages, **options)
        self._check(messages, tools, text)

        # A short text, such as "7", may occur by chance where its message was skipped. So each new
        # kind of conversation is rendered once more, with words that occur nowhere else.
        shape = _shape(messages), answer_follows, bool(tools), repr(variables)
        if shape not in self._complete:
            self._check_words(messages, options)
            if len(self._complete) >= MAX_SHAPES:
                self._complete.clear()
            self._complete.add(shape)
        return text

    def formed(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        variables: dict[str, Any],
    ) -> tuple[list[Message], dict[str, Any]]:
        """Return messages and variables in the form that this template takes."""
        all_tools = [*(self.variables.get("tools") or []), *tools]
        variables = self.variables | variables | {"tools": all_tools or None}
        return self._formed(messages, all_tools), variables

    def warn(self, problem: str) -> None:
        """Log what the template does, once and on the first rank."""
        if problem not in self._complete and is_first_rank():
            logger.warning(problem)
        self._complete.add(problem)

    @cached_property
    def closing(self) -> Closing:
        """Return how the template ends a turn: with the first special token after the answer.

        Of several in a row it is the last one that also ends a turn that others follow.
        """
        answer = {"role": "assistant", "content": WORD}
        after_last = self._probe([QUESTION, answer]).rpartition(WORD)[2]
        after_inner = (
            self._probe([QUESTION, answer, QUESTION]).partition(WORD + "?")[2].partition(WORD)[2]
        )
        last = self._special_tokens_in(after_last)
        inner = self._special_tokens_in(after_inner)

        if not last:
            mark = self._mark_of_next(after_inner)
            return Closing(mark, mark, mark, begins_next=bool(mark))

        both = [pair for pair in zip(last, inner, strict=False) if pair[0][0] == pair[1][0]]
        (token, end), (_, inner_end) = (
            both[-1] if both else (last[0], inner[0] if inner else ("", 0))
        )
        return Closing(after_last[:end], after_inner[:inner_end], token)

    @cached_property
    def call_end(self) -> str:
        """Return the special token that ends a turn of calls, such as <|call|>; empty without one.

        It is the last token that the template writes, unless it also stands between two calls. Where
        turns end with the mark of the next one, it is the mark before results.
        """
        if self.closing.begins_next:
            result = {"role": "tool", "tool_call_id": CALL["id"], "content": WORD}
            turns = [QUESTION, _turn_of_calls(1)]
            called, answered = (self._probe(all, tools=[TOOL]) for all in (turns, [*turns, result]))
            follows = answered.startswith(called.rstrip())
            return self._mark_of_next(answered[len(called.rstrip()) :]) if follows else ""

        one, two = (
            self._probe([QUESTION, _turn_of_calls(count)], tools=[TOOL]) for count in (1, 2)
        )
        written = one.rpartition(ARGUMENT)[2].rstrip() if ARGUMENT in one else ""
        end = next((token for token in self._special_tokens if written.endswith(token)), "")
        first, _, second = two.rpartition(ARGUMENT)[0].rpartition(ARGUMENT)
        return end if not first or end not in second else ""

    def _mark_of_next(self, after: str) -> str:
        """Return the special token that a text begins with, unless an answer begins with it too."""
        header = self._probe([QUESTION], answer_follows=True).rpartition(WORD)[2]
        marks = [token for token in self._special_tokens if after.lstrip().startswith(token)]
        return marks[0] if marks and marks[0] not in header else ""

    @cached_property
    def thoughts(self) -> dict[str, str]:
        """Return the keys of a turn whose thinking the template renders, each with such a turn."""
        turns = {name: {"role": "assistant", "content": WORD, name: THOUGHT} for name in THOUGHTS}
        rendered = {name: self._probe([QUESTION, turn]) for name, turn in turns.items()}
        return {name: text for name, text in rendered.items() if THOUGHT in text}

    def reads_thoughts(self, begin: str) -> bool:
        """Return whether thinking may stay in the text of a turn, after the mark `begin`.

        A template that writes marks of its own would write them a second time. Warn of one that has
        no other place for thinking.
        """
        if begin not in self._reads:
            said = f"{begin}\n{THOUGHT}\n{THINKING[begin]}\n\n{WORD}"
            in_text = self._probe([QUESTION, {"role": "assistant", "content": said}])
            others = [_squeezed(text) for text in self.thoughts.values()]
            self._reads[begin] = not others or _squeezed(in_text) in others
            source = str(self.tokenizer.chat_template)
            differs = begin not in source and any(name in source for name in THOUGHTS)
            if not others and (differs or sum(map(in_text.count, THINKING)) > 1):
                self.warn(
                    f"the chat template has another form of thinking than {begin}, and does not"
                    f" write the thinking of a row in it: {begin} in answers is learned as text"
                )
        return self._reads[begin]

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Return the tokens that end a turn: the tokenizer's end token, and the template's."""
        written = [token for token in (self.closing.token, self.call_end) if token]
        ends = {self.tokenizer.eos_token_id, *self.tokenizer.convert_tokens_to_ids(written)}
        return frozenset(ends - {None})

    @property
    def ends(self) -> list[str]:
        """Return the texts of the tokens that end a turn."""
        return [text for text in (self.closing.token, self.tokenizer.eos_token) if text]

    def describes(self, tools: Iterable[dict[str, Any]]) -> bool:
        """Return whether the template describes tools to the model."""
        text = self._probe([QUESTION], tools=list(tools))
        return all(tool["function"]["name"] in text for tool in tools)

    # -- what the template does, found out by rendering

    @cached_property
    def _takes_text(self) -> bool:
        """Return False if contents must be lists of parts."""
        parts = [{"role": "user", "content": [{"type": "text", "text": WORD}]}]
        return WORD in self._probe(
            [{"role": "user", "content": WORD}], formed=True
        ) or WORD not in self._probe(parts, formed=True)

    @cached_property
    def _form_of_calls(self) -> tuple[bool, str | None]:
        """Return whether arguments are JSON text, and the content of a turn of calls alone."""
        function = CALL["function"]

        # The first form that the template prints as neither Python nor quoted JSON is its own.
        for is_json in (False, True):
            arguments = json.dumps(function["arguments"]) if is_json else function["arguments"]
            call = CALL | {"function": function | {"arguments": arguments}}
            for content in (None, ""):
                turn = {"role": "assistant", "content": content, "tool_calls": [call]}
                text = self._probe(
                    [QUESTION if self._takes_text else _as_parts(QUESTION), turn],
                    formed=True,
                    tools=[TOOL],
                )
                _, _, rest = text.partition(WORD)
                printed = (
                    "None" in rest or repr(function["arguments"]) in rest or '\\"of_call' in rest
                )
                if "word_tool" in rest and ARGUMENT in rest and not printed:
                    return is_json, content
        return False, ""

    @cached_property
    def _header(self) -> str:
        """Return the beginning of an answer, if the template writes it only before one."""
        before = self._probe([QUESTION])
        question = self._probe([QUESTION], answer_follows=True)
        text = self._probe([QUESTION, {"role": "assistant", "content": WORD}])
        if before != question or not text.startswith(before):
            return ""
        header = text[len(before) :].partition(WORD)[0]
        return header if header.strip() else ""

    @cached_property
    def _special_tokens(self) -> list[str]:
        """Return the special tokens of the tokenizer, the longest first."""
        added = self.tokenizer.added_tokens_decoder.values()
        names = {str(token) for token in added if token.special}
        return sorted(names.union(self.tokenizer.all_special_tokens), key=len, reverse=True)

    def _special_tokens_in(self, text: str) -> list[tuple[str, int]]:
        """Return the first special token of a text and those right behind it, each with the end."""
        pattern = re.compile("|".join(map(re.escape, self._special_tokens)) or r"(?!)")
        found: list[tuple[str, int]] = []
        match = pattern.search(text)
        while match:
            found.append((match[0], match.end()))
            match = pattern.match(text, match.end())
        return found

    # -- rendering

    def _probe(
        self,
        messages: Sequence[Message],
        *,
        answer_follows: bool = False,
        formed: bool = False,
        tools: Any = None,
    ) -> str:
        """Render messages of our own; empty if the template rejects them."""
        variables = self.variables | {"tools": tools or self.variables.get("tools")}
        try:
            messages = messages if formed else self._formed(messages)
            return self._apply(messages, answer_follows=answer_follows, variables=variables)
        except ValueError:
            return ""

    def _render(
        self, messages: Sequence[Message], *, answer_follows: bool, variables: dict[str, Any]
    ) -> str:
        text = self._apply(
            self._formed(messages, variables.get("tools") or ()),
            answer_follows=answer_follows,
            variables=variables,
        )
        return text + self._header if answer_follows else text

    def _apply(
        self, messages: Sequence[Message], *, answer_follows: bool, variables: dict[str, Any]
    ) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answer_follows, **variables
            )
        except Exception as error:  # a template is a program and raises its own errors
            raise rejection(error) from error

    def _formed(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> list[Message]:
        """Return messages in the form that the template takes, without keys that are not for it."""
        formed = [
            {name: value for name, value in message.items() if name not in WEIGHT_KEYS}
            for message in messages
        ]
        if any(message.get("tool_calls") for message in formed):
            formed = [self._with_formed_calls(message, tools) for message in formed]
        return formed if self._takes_text else [_as_parts(message) for message in formed]

    def _with_formed_calls(self, message: Message, tools: Sequence[dict[str, Any]]) -> Message:
        if not message.get("tool_calls"):
            return message
        as_json, empty = self._form_of_calls
        calls = [without_null_arguments(call, tools) for call in message["tool_calls"]]
        if as_json:
            calls = [_with_json_arguments(call) for call in calls]
        return message | {"tool_calls": calls, "content": message["content"] or empty}

    # -- checks

    def _check(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], text: str
    ) -> None:
        """Raise ValueError if a message or a tool is missing, or only there as Python prints it."""
        if missing := [
            tool["function"]["name"] for tool in tools if tool["function"]["name"] not in text
        ]:
            raise ValueError(
                f"the chat template does not describe the tool {missing[0]} to the model: use a"
                " template that does, or rows without tools"
            )

        # Templates cut the thinking from earlier turns on purpose, so answers are not searched for.
        read = [
            message | {"content": ""} if is_answer(message) else message for message in messages
        ]
        if number := _first_lost(read, text):
            raise ValueError(_left_out(messages, number))

        for number, message in enumerate(messages, 1):
            if isinstance(message["content"], list) and _is_printed(message["content"], text):
                raise ValueError(
                    f"the chat template takes text, and prints the parts of message {number} of"
                    f" {len(messages)}"
                )

    def _check_words(self, messages: Sequence[Message], options: dict[str, Any]) -> None:
        """Raise ValueError if the template leaves out a message of this kind, whatever its text."""
        words = [message | _words(message, number) for number, message in enumerate(messages)]
        try:
            text = self._render(words, **options)
        except ValueError:  # the template reads the text
            return

        if number := _first_lost(words, text):
            raise ValueError(_left_out(messages, number))

        for number, message in enumerate(words, 1):
            for call in message.get("tool_calls") or ():
                if call["function"]["name"] not in text:
                    raise ValueError(
                        f"the chat template leaves out the tool calls of message {number} of"
                        f" {len(messages)}: use a template that writes them; some write only the"
                        " first call of a turn"
                    )


def rejection(error: Exception) -> ValueError:
    """Return the error of a row that a template rejects."""
    return ValueError(
        f"the chat template rejects it ({type(error).__name__}: {error}); change the row, or use"
        " another template"
    )


def texts_of(message: Message) -> list[str]:
    """Return the texts of a message, between which media may stand."""
    content = message["content"] or ""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def contains(text: str, pieces: Iterable[str]) -> bool:
    """Return whether all pieces occur in a text, apart from white space."""
    squeezed = _squeezed(text)
    return all(_squeezed(piece) in squeezed for piece in pieces)


def answer_pieces(message: Message) -> list[str]:
    """Return the texts that a learned turn must contain: thinking without tags, and the answer."""
    tags = "|".join(map(re.escape, THINKING_MARKS))
    pieces = [piece for text in texts_of(message) for piece in re.split(tags, text)]
    return [*pieces, *(str(message[name]) for name in THOUGHTS if message.get(name))]


def _first_lost(messages: Sequence[Message], text: str) -> int:
    """Return the number of the first message that is not in a rendered text, from 1; 0 if all are.

    Messages of the user and the assistant stand in order; templates move other ones.
    """
    squeezed = _squeezed(text)
    begin = 0
    for number, message in enumerate(messages, 1):
        in_order = message["role"] in ("user", "assistant")
        end = begin if in_order else 0
        for text in texts_of(message):
            end = _end_in(squeezed, text, end)
            if end < 0:
                return number
        begin = end if in_order else begin

    return 0


def _end_in(squeezed: str, text: str, start: int) -> int:
    """Return the index after a text, also inside of a JSON string; -1 if it is not there."""
    forms = (text, *(json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
    found = ((squeezed.find(form, start), form) for form in map(_squeezed, forms))
    return next((found_at + len(form) for found_at, form in found if found_at >= 0), -1)


def _left_out(messages: Sequence[Message], number: int) -> str:
    role = messages[number - 1]["role"]
    hint = "" if role in ("user", "assistant") else "; it may not know this role"
    return (
        f"the chat template leaves out the text of message {number} of {len(messages)}, of role"
        f" {role!r}{hint}: use a template that writes it, or remove the message"
    )


def _is_printed(parts: list[Message], text: str) -> bool:
    return any(repr(part) in text or json.dumps(part, ensure_ascii=False) in text for part in parts)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _shape(messages: Sequence[Message]) -> tuple[Any, ...]:
    """Return what a template's decisions about messages usually depend on."""
    return tuple(
        (turn["role"], _kind(turn["content"]), len(turn.get("tool_calls") or ()), *sorted(turn))
        for turn in messages
    )


def _kind(content: Any) -> Any:
    return tuple(part["type"] for part in content) if isinstance(content, list) else bool(content)


def _words(message: Message, number: int) -> Message:
    """Return the content and the calls of a message with words of our own in place of texts."""
    word = f"{WORD}{number}{WORD}"
    content = message["content"]
    if isinstance(content, list):
        content = [
            part | {"text": f"{word}{index}{word}"} if part["type"] == "text" else part
            for index, part in enumerate(content)
        ]
    elif content:
        content = word

    # Arguments stay: templates look into them.
    calls = [
        call
        | {
            "function": {
                "name": f"word{number}_{index}_word",
                "arguments": call["function"]["arguments"],
            }
        }
        for index, call in enumerate(message.get("tool_calls") or ())
    ]
    return {"content": content} | ({"tool_calls": calls} if calls else {})


def _as_parts(message: Message) -> Message:
    if not isinstance(message.get("content"), str):
        return message | {"content": message.get("content") or []}
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def _turn_of_calls(count: int) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": [CALL] * count}


def _with_json_arguments(call: Message) -> Message:
    function = call["function"]
    return call | {
        "function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    }
