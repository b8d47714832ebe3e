"""Decide what a row means: which columns are the prompt, the answers, and the right answer.

    {"instruction": "Add.", "input": "4, 5", "output": "9"}  ->  Alpaca: instruction + input -> output

Trainers, evaluations and agents read rows here, each for one purpose. What a row means follows from
all of its columns and from the types of their values. A flag that names a column has precedence,
and a row that could mean two things is refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from loguru import logger

from lightrft.config.sections import DataSection, PreferenceSection, media_columns
from lightrft.data.readers import is_first_rank
from lightrft.data.rendering.messages import (
    Message,
    as_messages,
    is_answer,
    messages_in_text,
    shortened,
)
from lightrft.data.rendering.template import texts_of

Row = Mapping[str, Any]
Purpose = Literal["prompt", "answer", "pair", "judged", "steps"]
"""What a trainer takes from a row: a prompt with what rewards compare with, a prompt with an answer
to learn, with two answers, with an answer that is good or bad, or with steps that are judged.
"""

CONTEXTS = ("context", "passage", "article", "document")
"""Columns that follow the question in a prompt, after an empty line."""
PROMPTS = {
    "input": (),
    "inputs": (),
    "prompt": (),
    "instruction": ("input", *CONTEXTS),
    "question": CONTEXTS,
    "problem": CONTEXTS,
    "query": CONTEXTS,
}
"""Columns that are the prompt -> columns that belong to it, if the row has them."""
SYSTEMS = ("system", "system_prompt")
HISTORY = "history"
"""Column with earlier turns: pairs of texts, or messages."""
CHOICES = ("choices", "options")
"""Columns without which a question cannot be answered, and that no form writes into the prompt."""
CHATS = ("messages", "conversations", "conversation")
"""Columns with whole conversations."""
LEARNED = (
    ("output", "completion", "response", "solution", "generated_solution", "target", "targets"),
    ("answer",),
    ("label",),
)
"""Columns of an answer to learn. A row must not have two of one line; the first line has precedence.
"""
SCORED = (
    ("label", "answer", "expected_answer", "final_answer", "ground_truth", "reward_model"),
    ("solution", "target", "targets"),
    ("output", "completion", "response", "generated_solution"),
)
"""Columns of the right answer that rewards compare with, in the same order."""
PAIRS = (
    ("chosen_response", "rejected_response"),
    ("preferred_output", "non_preferred_output"),
    ("response", "rejected_response"),
    ("messages", "rejected_response"),
)
"""Columns of a chosen and a rejected answer, if the row has none of --chosen_key. The chosen one may
be the last turn of a conversation.
"""
RANKED = {
    "preference_strength": ("response_1", "response_2"),
    "overall_preference": ("response1", "response2"),
}
"""Columns with a number, below 0 if the first of two answers is better -> columns of the answers."""
JUDGED = (("completion", "response", "output", "answer"), CHATS)
"""Columns of an answer that is good or bad."""
JUDGEMENTS = (("label", "kto_tag"),)
LABEL = "label"
ENDING = re.compile(r"\n####[ ]*(\S.*?)\s*$")
"""Right answer at the end of a solution of GSM8K."""
ENDS_WITH_ANSWER = (
    "the last message of {!r} is a turn of the assistant, so the prompt contains the answer; remove"
    " that message"
)

FORMS = {
    ("instruction", "output"): "Alpaca",
    ("instruction", "response"): "Dolly",
    ("question", "response"): "OpenOrca",
    ("question", "answer"): "GSM8K",
    ("problem", "solution"): "MATH",
    ("problem", "answer"): "MATH",
    ("problem", "generated_solution"): "OpenMathInstruct",
    ("problem", "expected_answer"): "OpenMathInstruct",
    ("prompt", "completion"): "TRL",
    ("prompt", "response"): "HelpSteer",
    ("prompt", "reward_model"): "verl",
    ("prompt", "chosen"): "TRL",
    ("", "chosen"): "HH-RLHF",
    ("query", "response"): "ms-swift",
    ("inputs", "targets"): "FLAN",
    ("conversations", ""): "ShareGPT",
    ("messages", ""): "chat messages",
}
"""Columns of prompt and answer -> name of the form in the log."""
LAST_TURN = "the last turn"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a row means."""

    prompt: str | list[Message] | None
    """Text or messages; None if the answers are whole conversations."""
    columns: tuple[str, ...]
    """Columns of the prompt."""
    answers: tuple[Any, ...] = ()
    """Answers to learn or to compare: texts, messages, or values that cannot be learned. None are
    needed if the prompt is a whole conversation.
    """
    label: Any = None
    """Right answer, judgement, or labels of steps."""
    names: tuple[str, ...] = ()
    """Columns of the answers and of the label."""

    @property
    def form(self) -> str:
        """Return the columns in one line, such as `Alpaca: instruction + input -> output`."""
        asked = [name for name in self.columns if name.lower() not in (*SYSTEMS, HISTORY)]
        key = [(names or ("",))[0].lower().partition(".")[0] for names in (asked, self.names)]
        name = FORMS.get((key[0], "" if key[1] == LAST_TURN else key[1]), "")
        sides = " + ".join(self.columns), ", ".join(self.names)
        return f"{name}: ".removeprefix(": ") + " -> ".join(filter(None, sides))


def read_row(
    section: DataSection,
    row: Row,
    purpose: Purpose,
    preference: PreferenceSection | None = None,
) -> Reading:
    """Return what a row means for a purpose.

    Raise ValueError for a row that means nothing, or could mean two things, and name the flag.
    """
    reader = _Reader(section, row, preference or PreferenceSection())
    return {
        "prompt": reader.scored,
        "answer": reader.learned,
        "pair": reader.pair,
        "judged": reader.judged,
        "steps": reader.steps,
    }[purpose]()


def column(row: Row, name: str, flag: str) -> Any:
    """Return a column of a row.

    If it is missing or empty, raise a ValueError that names the flag.
    """
    if name not in row:
        texts = [other for other in row if _may_ask(row[other])]
        hint = f"; name one of them, such as --{flag} {texts[0]}" if texts else ""
        raise ValueError(f"no column {name!r} (--{flag}); it has {', '.join(row) or 'none'}{hint}")
    value = row[name]
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"the column {name!r} (--{flag}) is empty")
    return value


def answer_value(section: DataSection, value: Any) -> Any:
    """Return an answer: a text stays a text, and a list of messages becomes clean messages.

    A text is read as messages with --json_chats always.
    """
    if isinstance(value, str):
        always = section.json_chats == "always"
        return (messages_in_text(value, strict=False) if always else None) or value
    return as_messages([value] if isinstance(value, dict) and _may_ask([value]) else value) or value


def prompt_value(section: DataSection, value: Any, name: str) -> str | list[Message]:
    """Return the text or the messages of a prompt; a text may have messages as JSON (--json_chats).

    Raise ValueError for other values, and name the column.
    """
    if not section.apply_chat_template and not isinstance(value, str):
        raise ValueError(
            f"{name!r} is {type(value).__name__}, not text; chat messages need"
            " --apply_chat_template"
        )
    if not isinstance(value, str):
        if (messages := as_messages(value)) is None:
            raise ValueError(
                f"{name!r} is neither text nor a list of chat messages: {shortened(value)}"
            )
        return messages
    if section.json_chats == "never":
        return value

    # Columns with such names have nothing else.
    strict = section.json_chats == "auto" and name.lower() not in CHATS
    messages = messages_in_text(value, strict=strict)
    if messages is None:
        if strict and messages_in_text(value, strict=False):
            _warn(
                f"{name!r} has JSON that looks like chat messages, but with other keys or roles; it"
                " is read as a text (--json_chats always reads messages, never only texts)"
            )
        return value
    if not section.apply_chat_template:
        raise ValueError(
            f"{name!r} is a list of chat messages as JSON: they need --apply_chat_template, or"
            " --json_chats never if it is a text"
        )
    return messages


@lru_cache(maxsize=64)
def _warn(text: str) -> None:
    """Log a warning once and on the first rank."""
    if is_first_rank():
        logger.warning(text)


def _may_ask(value: Any) -> bool:
    """Return whether a value is a text, or a list of objects that may be messages."""
    return isinstance(value, str) or (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(each, dict) and {"role", "from"} & each.keys() for each in value)
    )


class _Reader:
    """Reader of one row."""

    def __init__(self, section: DataSection, row: Row, preference: PreferenceSection):
        """Set up the reading. `preference` has further flags that name columns."""
        self.section = section
        self.row = row
        self.preference = preference
        self.found = {name.lower(): name for name, value in row.items() if value is not None}
        """Name in lower case -> column, of those that are not null."""

    # -- one method for each purpose

    def learned(self) -> Reading:
        """Return a prompt with an answer to learn, or a whole conversation."""
        prefers_chat = self.section.apply_chat_template and self.section.input_key is None
        name = self._chat() if prefers_chat and not self._is_own() else None
        prompt, columns = self._named(name) if name else self._prompt()
        named = self.section.label_key
        answer = named or self._first(LEARNED, "label_key", of=self._is_learnable)
        if isinstance(prompt, list) and is_answer(prompt[-1]):
            # The column of the answer is for rewards, unless the prompt is one by its name.
            if answer is None or not {*map(str.lower, columns)} & PROMPTS.keys():
                return Reading(prompt, columns)
            raise ValueError(ENDS_WITH_ANSWER.format(columns[0]))

        answer = answer or self.found.get(LABEL)
        if answer is None:
            return Reading(prompt, columns, (None,))
        if answer not in self.row:
            column(self.row, answer, "label_key")
        value = answer_value(self.section, self.row[answer])
        return Reading(prompt, columns, (value,), None, (answer,))

    def scored(self) -> Reading:
        """Return a prompt with the right answer; that of a conversation is the last turn."""
        prompt, columns = self._prompt()
        named = self.section.label_key
        label = named or (
            LABEL if self._is_own() else self._first(SCORED, "label_key", of=self._has_truth)
        )

        if isinstance(prompt, list) and is_answer(prompt[-1]):
            if label and not {*map(str.lower, columns)} & {*CHATS}:
                raise ValueError(ENDS_WITH_ANSWER.format(columns[0]))
            turns = len(prompt)
            while turns and is_answer(prompt[turns - 1]):
                turns -= 1
            if not turns:
                raise ValueError(f"{columns[0]!r} has turns of the assistant alone")
            value = "".join(texts_of(prompt[-1]))
            prompt = prompt[:turns]
            if not label:
                return Reading(prompt, columns, (), value, (LAST_TURN,))

        if label is None:
            return Reading(prompt, columns)
        if label not in self.row:
            raise ValueError(f"no column {label!r} (--label_key); it has {', '.join(self.row)}")
        value = self.row[label]
        if not named and label.lower() == "reward_model":
            return Reading(prompt, columns, (), value["ground_truth"], (f"{label}.ground_truth",))
        if not named and isinstance(value, str) and (ending := ENDING.search(value)):
            value = ending[1].replace(",", "")
        return Reading(prompt, columns, (), value, (label,))

    def pair(self) -> Reading:
        """Return a chosen and a rejected answer; the prompt may be in them."""
        chosen = self.preference.chosen_key
        rejected = self.preference.rejected_key
        if not {chosen, rejected} & self.row.keys():
            for ranking, names in RANKED.items():
                if ranking in self.found and all(name in self.found for name in names):
                    return self._ranked(self.found[ranking], names)
            pairs = [names for names in PAIRS if all(name in self.found for name in names)]
            if pairs:
                chosen, rejected = (self.found[name] for name in pairs[0])

        values = [
            answer_value(self.section, column(self.row, name, flag))
            for name, flag in ((chosen, "chosen_key"), (rejected, "rejected_key"))
        ]
        if chosen.lower() in CHATS and isinstance(values[0], list):
            *prompt, last = values[0]
            return Reading(prompt, (chosen,), ([last], values[1]), None, (LAST_TURN, rejected))
        prompt, columns = self._prompt(needed=False, alone=all(map(is_whole, values)))
        return Reading(prompt, columns, tuple(values), None, (chosen, rejected))

    def judged(self) -> Reading:
        """Return an answer that is good or bad; the prompt may be in it."""
        name = self.preference.completion_key or self._first(JUDGED, "completion_key")
        name = name or JUDGED[0][0]
        value = answer_value(self.section, column(self.row, name, "completion_key"))
        judgement = self.section.label_key or self._first(JUDGEMENTS, "label_key") or LABEL
        prompt, columns = (None, ())
        if name.lower() not in CHATS:
            prompt, columns = self._prompt(needed=False, alone=is_whole(value))
        label = column(self.row, judgement, "label_key")
        return Reading(prompt, columns, (value,), label, (name, judgement))

    def steps(self) -> Reading:
        """Return a prompt, steps, and their labels."""
        steps = self.preference.completion_key or "completions"
        labels = self.section.label_key or (LABEL if LABEL in self.row else "labels")
        values = column(self.row, steps, "completion_key"), column(self.row, labels, "label_key")
        prompt, columns = self._prompt()
        return Reading(prompt, columns, values[:1], values[1], (steps, labels))

    # -- columns

    def _ranked(self, ranking: str, names: Sequence[str]) -> Reading:
        preference = self.row[ranking]
        if (
            isinstance(preference, bool)
            or not isinstance(preference, int | float)
            or not preference
        ):
            raise ValueError(f"the column {ranking!r} is {preference!r}: no answer is better")
        names = tuple(self.found[name] for name in names)[:: 1 if preference < 0 else -1]
        values = tuple(answer_value(self.section, self.row[name]) for name in names)
        prompt, columns = self._prompt()
        return Reading(prompt, columns, values, None, tuple(sorted(names)))

    def _is_own(self) -> bool:
        """Return whether the row has the columns that are the default: input and label."""
        return self.section.input_key is None and (
            {"input", LABEL} <= self.row.keys() and "instruction" not in self.found
        )

    def _chat(self) -> str | None:
        """Return the column with a whole conversation."""
        names = [self.found[name] for name in CHATS if name in self.found]
        return next((name for name in names if _is_chat(self.row[name])), None)

    def _is_learnable(self, name: str) -> bool:
        return _may_ask(self.row[name])

    def _has_truth(self, name: str) -> bool:
        value = self.row[name]
        return name.lower() != "reward_model" or (
            isinstance(value, Mapping) and "ground_truth" in value
        )

    def _first(
        self,
        lines: Sequence[Sequence[str]],
        flag: str,
        of: Callable[[str], bool] = lambda name: True,
    ) -> str | None:
        """Return the column of the first line that the row has one of; None if it has none.

        Raise ValueError if it has two of a line whose values differ.
        """
        for line in lines:
            names = [self.found[name] for name in line if name in self.found]
            names = [name for name in names if of(name)]
            if any(self.row[name] != self.row[names[0]] for name in names):
                raise ValueError(_two_meanings(names, flag))
            if names:
                return names[0]
        return None

    def _prompt(
        self, *, needed: bool = True, alone: bool = False
    ) -> tuple[str | list[Message] | None, tuple[str, ...]]:
        """Return the prompt and its columns.

        `alone` says that the answers are conversations, and need no prompt.
        """
        if (name := self.section.input_key) is not None:
            if not needed and self.row.get(name) is None:
                return None, ()
            if name not in self.row:
                column(self.row, name, "input_key")
            return self._named(name)

        names = [self.found[name] for name in PROMPTS if name in self.found]
        names = [name for name in names if _may_ask(self.row[name])]
        if self._is_own():
            names = ["input"]
        elif "instruction" in self.found:
            names = [name for name in names if name.lower() not in PROMPTS["instruction"]]
        if any(self.row[name] != self.row[names[0]] for name in names):
            raise ValueError(_two_meanings(names, "input_key"))
        if names:
            return self._joined(names[0])

        chat = None if alone else self._chat()
        if chat is None and not needed:
            return None, ()
        if chat is None and "input" not in self.row:
            column(self.row, "input", "input_key")
        return self._named(chat or "input")

    def _named(self, name: str) -> tuple[str | list[Message], tuple[str, ...]]:
        """Return the prompt that is in one column."""
        value = prompt_value(self.section, self.row[name], name)
        self._check_not_empty(value)
        return value, (name,)

    def _joined(self, name: str) -> tuple[str | list[Message], tuple[str, ...]]:
        """Return the prompt of a column, with the other columns that belong to it."""
        value = prompt_value(self.section, self.row[name], name)
        others = [self.found[each] for each in PROMPTS[name.lower()] if each in self.found]
        systems = [self.found[each] for each in SYSTEMS if self._text(each).strip()][:1]
        columns = (*systems, name, *others)

        # What is left out here would be missing from the question.
        unread = [each for each in others if not isinstance(self.row[each], str)]
        if PROMPTS[name.lower()]:
            unread += [self.found[each] for each in CHOICES if self.found.get(each)]
        if isinstance(value, list):
            unread += [each for each in others if self.row[each].strip()]
        if unread:
            raise ValueError(
                f"the column {unread[0]!r} belongs to the question in {name!r}, and cannot be"
                " written after it; write the prompt in one column, and name it with --input_key"
            )

        if isinstance(value, str):
            texts = [value, *(self.row[each] for each in others)]
            if not self.section.apply_chat_template:
                texts = [*(self.row[each] for each in systems), *texts]
            value = "\n\n".join(text for text in texts if text.strip())
        self._check_not_empty(value)
        if (turns := self.row.get(self.found.get(HISTORY))) and not self._is_own():
            return self._with_history(turns, value), (self.found[HISTORY], *columns)
        return value, columns

    def _with_history(self, turns: Any, value: str | list[Message]) -> list[Message]:
        """Return the messages of earlier turns, and then the prompt."""
        if isinstance(turns, list) and all(isinstance(turn, list) for turn in turns):
            roles = ("user", "assistant")
            turns = [
                {"role": role, "content": text}
                for turn in turns
                for role, text in zip(roles, turn, strict=False)
            ]
        now = [{"role": "user", "content": value}] if isinstance(value, str) else value
        return [*prompt_value(self.section, turns, self.found[HISTORY]), *now]

    def _text(self, name: str) -> str:
        value = self.row.get(self.found.get(name))
        return value if isinstance(value, str) else ""

    def _check_not_empty(self, value: str | list[Message]) -> None:
        has_media = any(self.row.get(name) for name in media_columns(self.section).values())
        if isinstance(value, str) and not value.strip() and not has_media:
            raise ValueError("the prompt is empty")


def is_whole(value: Any) -> bool:
    """Return whether an answer is a conversation that begins with somebody else's message."""
    return isinstance(value, list) and isinstance(value[0], dict) and not is_answer(value[0])


def _is_chat(value: Any) -> bool:
    if isinstance(value, str):
        return value.lstrip().startswith("[") and bool(messages_in_text(value, strict=False))
    return _may_ask(value)


def _two_meanings(names: Sequence[str], flag: str) -> str:
    what = {"input_key": "prompt", "label_key": "answer"}.get(flag, "answer")
    return (
        f"each of the columns {', '.join(names)} could be the {what}, and they differ; name one"
        f" with --{flag}"
    )
