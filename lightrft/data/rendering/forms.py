"""Decide what a row means: which columns are the prompt, the answers, and the right answer.

    {"instruction": "Add.", "input": "4, 5", "output": "9"}  ->  Alpaca: instruction + input -> output

Trainers, evaluations and agents read rows here, each for one purpose. What a row means follows from
all of its columns and from the types of their values. A flag that names a column has precedence,
and a row that could mean two things is refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from loguru import logger

from lightrft.config.sections import DataSection, PreferenceSection, media_columns
from lightrft.config.tables import table
from lightrft.data.rendering.messages import (
    Message,
    as_messages,
    is_answer,
    is_blank,
    is_message,
    objects_in_text,
    parsed,
    shortened,
    turns_in_text,
)
from lightrft.data.rendering.template import texts_of
from lightrft.models.parallel.mesh import process_rank

Row = Mapping[str, Any]

DATA_NAMES = table("data/rendering/names")
PROMPTS: dict[str, list[str]] = DATA_NAMES["prompts"]
"""Columns that are the prompt -> columns that belong to it, if the row has them."""
CONTEXTS = PROMPTS["question"]
"""Columns that follow the question in a prompt, after an empty line."""
SYSTEMS = ("system", "system_prompt")
EARLIER = "history"
"""Column with earlier turns: pairs of texts, or messages."""
CHOICES = re.compile(
    r"(choice|option|ending|alternative|candidate|distractor)s"
    r"|(choice|option|opt?|ending|answer|alternative|candidate|distractor)[ _]?[1-9b-e]|\(?b[).]?"
)
"""Names of columns without which a question cannot be answered, and that no form reads."""
CHATS: list[str] = DATA_NAMES["chats"]
"""Columns with whole conversations."""
LABEL = "label"
TRUTH = ("reward_model", "ground_truth")
"""Column of verl, and its key with the right answer."""
ENDING = re.compile(r"\n####[ ]*(\S.*?)\s*$")
"""Right answer at the end of a solution of GSM8K."""
ENDS_WITH_ANSWER = (
    "the last message of {!r} is a turn of the assistant, so the prompt contains the answer; remove"
    " that message"
)

FORMS = {(prompt, answer): form for prompt, answer, form in table("data/rendering/forms")}
"""Columns of prompt and answer -> name of the form in the log."""
LAST_TURN = "the last turn"


@dataclass(frozen=True, slots=True)
class Reading:
    """Holds what a row means."""

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
    def asked(self) -> list[str]:
        """Return the columns that have nothing but the prompt."""
        return [name for name in self.columns if name.lower() not in (*SYSTEMS, EARLIER, *CONTEXTS)]

    @property
    def form(self) -> str:
        """Return the columns in one line, such as `Alpaca: instruction + input -> output`."""
        key = [(names or ("",))[0].lower().partition(".")[0] for names in (self.asked, self.names)]
        name = FORMS.get((key[0], key[1].replace(LAST_TURN, "")))
        sides = " + ".join(self.columns), ", ".join(self.names)
        return (f"{name}: " if name else "") + " -> ".join(filter(None, sides))


def learned(section: DataSection, row: Row) -> Reading:
    """Return a prompt with an answer to learn, or a whole conversation.

    Raise ValueError for a row that means nothing, or could mean two things, and name the flag. So
    do the other functions.
    """
    columns = _Columns(section, row)
    prefers_chat = section.apply_chat_template and section.input_key is None
    chat = columns.chat if prefers_chat and not columns.has_default_columns else None
    prompt, names = columns.named(chat) if chat else columns.prompt()

    answer = columns.label or columns.first(DATA_NAMES["learned"], "label_key", texts=True)
    if isinstance(prompt, list) and is_answer(prompt[-1]):
        # The column of the answer is for rewards, unless the prompt is one by its name.
        if answer is None or names[0].lower() not in PROMPTS:
            return Reading(prompt, names)
        raise ValueError(ENDS_WITH_ANSWER.format(names[0]))

    if answer is None:
        return Reading(prompt, names, (row.get(columns.found.get(LABEL)),))
    value = answer_value(section, column(row, answer, "label_key", may_be_empty=True))
    return Reading(prompt, names, (value,), None, (answer,))


def scored(section: DataSection, row: Row) -> Reading:
    """Return a prompt with the right answer, which is the last turn of a conversation."""
    columns = _Columns(section, row)
    prompt, names = columns.prompt()
    label = columns.label or columns.first(DATA_NAMES["scored"], "label_key")
    if isinstance(prompt, list) and is_answer(prompt[-1]):
        if label and names[0].lower() not in CHATS:
            raise ValueError(ENDS_WITH_ANSWER.format(names[0]))
        said = "".join(texts_of(prompt[-1]))
        prompt = prompt[: max(n for n, turn in enumerate([{}, *prompt]) if not is_answer(turn))]
        if not prompt:
            raise ValueError(f"{names[0]!r} has turns of the assistant alone")
        if not label:
            return Reading(prompt, names, (), said, (LAST_TURN,))

    if label is None:
        return Reading(prompt, names)
    value = column(row, label, "label_key", may_be_empty=True)
    if section.label_key is None and label.lower() == TRUTH[0]:
        return Reading(prompt, names, (), columns.truth, (f"{label}.{TRUTH[1]}",))
    if section.label_key is None and isinstance(value, str) and (ending := ENDING.search(value)):
        value = ending[1].replace(",", "")
    elif isinstance(value, list) and _may_ask(value):  # an answer as SFT has it
        value = "".join(texts_of(as_messages(value)[-1]))
    return Reading(prompt, names, (), value, (label,))


def pair(section: DataSection, row: Row, preference: PreferenceSection) -> Reading:
    """Return a chosen and a rejected answer; the prompt may be in them."""
    columns = _Columns(section, row)
    keys = (preference.chosen_key, preference.rejected_key)
    ranking = None
    if not {*keys} & row.keys():
        ranking = columns.first([list(DATA_NAMES["ranked"])], "chosen_key")
        others = [DATA_NAMES["ranked"][ranking.lower()]] if ranking else DATA_NAMES["pairs"]
        found = [names for names in others if columns.found.keys() >= {*names}]
        keys = tuple(columns.found[name] for name in found[0]) if found else keys
    if ranking:
        preferred = row[ranking]
        if type(preferred) not in (int, float) or not abs(preferred) > 0:
            raise ValueError(f"the column {ranking!r} is {preferred!r}: no answer is better")
        keys = keys if preferred < 0 else keys[::-1]

    columns.found = {name: each for name, each in columns.found.items() if each not in keys}
    chosen = answer_value(section, column(row, keys[0], "chosen_key"))
    rejected = answer_value(section, column(row, keys[1], "rejected_key"))
    if keys[0].lower() in CHATS and isinstance(chosen, list):
        return Reading(chosen[:-1], keys[:1], (chosen[-1:], rejected), None, (LAST_TURN, keys[1]))
    alone = all(is_conversation(answer, True) for answer in (chosen, rejected))
    prompt, names = columns.prompt(needed=False, alone=alone)
    return Reading(prompt, names, (chosen, rejected), None, keys)


def judged(section: DataSection, row: Row, preference: PreferenceSection) -> Reading:
    """Return an answer that is good or bad; the prompt may be in it."""
    columns = _Columns(section, row)
    flag = "completion_key"
    name = preference.completion_key or columns.first(DATA_NAMES["judged"], flag) or "completion"
    answer = answer_value(section, column(row, name, flag))
    judgement = section.label_key or columns.first(DATA_NAMES["judgements"], "label_key") or LABEL
    label = column(row, judgement, "label_key")
    prompt, names = None, ()
    if name.lower() not in CHATS:
        prompt, names = columns.prompt(needed=False, alone=is_conversation(answer, True))
    return Reading(prompt, names, (answer,), label, (name, judgement))


def judged_steps(section: DataSection, row: Row, preference: PreferenceSection) -> Reading:
    """Return a prompt, the list of steps that answer it, and the list of their labels."""
    steps = preference.completion_key or "completions"
    labels = section.label_key or (LABEL if LABEL in row else "labels")
    values = column(row, steps, "completion_key"), column(row, labels, "label_key")
    prompt, names = _Columns(section, row).prompt()
    return Reading(prompt, names, values[:1], values[1], (steps, labels))


def is_conversation(answer: Any, alone: bool) -> bool:
    """Return whether an answer is a conversation with a prompt.

    `alone` says that the row has no other prompt.
    """
    return (
        isinstance(answer, list)
        and all(isinstance(each, dict) for each in answer)
        and not all(map(is_answer, answer))
        and (alone or not is_answer(answer[0]))
    )


def column(row: Row, name: str, flag: str, *, may_be_empty: bool = False) -> Any:
    """Return a column of a row.

    If it is missing, or empty and that is not allowed, raise a ValueError that names the flag.
    """
    if name not in row:
        texts = [other for other in row if _may_ask(row[other])]
        hint = f"; name one of them, such as --{flag} {texts[0]}" if texts else ""
        raise ValueError(f"no column {name!r} (--{flag}); it has {', '.join(row) or 'none'}{hint}")
    value = row[name]
    is_empty = value is None or value == [] or (isinstance(value, str) and is_blank(value))
    if is_empty and not may_be_empty:
        raise ValueError(f"the column {name!r} (--{flag}) is empty")
    return value


def answer_value(section: DataSection, value: Any) -> Any:
    """Return an answer: a text stays a text, and a list of messages becomes clean messages.

    A text is read as messages with --json_chats always.
    """
    if isinstance(value, str):
        objects = objects_in_text(value) if section.json_chats == "always" else None
        return as_messages(objects) or value
    return as_messages([value] if isinstance(value, dict) and _may_ask([value]) else value) or value


def prompt_value(section: DataSection, value: Any, name: str) -> str | list[Message]:
    """Return the text or the messages of a prompt; a text may have messages as JSON (--json_chats).

    Raise ValueError for other values, and name the column.
    """
    if not isinstance(value, str):
        if not section.apply_chat_template:
            kind = type(value).__name__
            raise ValueError(
                f"{name!r} is {kind}, not text; chat messages need --apply_chat_template"
            )
        if messages := as_messages(value):
            return messages
        raise ValueError(
            f"{name!r} is neither text nor a list of chat messages: {shortened(value)}"
        )

    if section.json_chats == "never":
        return value
    if section.apply_chat_template and (turns := turns_in_text(value)):
        become = "turns of Human: and Assistant: become messages (--json_chats never keeps texts)"
        _warn(f"{name!r}: its {become}")
        return turns
    objects = objects_in_text(value)
    # Columns with such names have nothing else.
    if objects and section.json_chats == "auto" and name.lower() not in CHATS:
        if not all(map(is_message, objects)):
            _warn(
                f"{name!r} has JSON that looks like chat messages, but with other keys or roles; it"
                " is read as a text (--json_chats always reads messages, never only texts)"
            )
            return value
    if objects and not section.apply_chat_template:
        raise ValueError(
            f"{name!r} is a list of chat messages as JSON: they need --apply_chat_template, or"
            " --json_chats never if it is a text"
        )
    return as_messages(objects) or value


@lru_cache(maxsize=64)
def _warn(text: str) -> None:
    """Log a warning once and on the first rank."""
    if process_rank() == 0:
        logger.warning(text)


def _may_ask(value: Any) -> bool:
    """Return whether a value is a text, or a list of objects that may be messages."""
    return isinstance(value, str) or (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(each, dict) and {"role", "from"} & each.keys() for each in value)
    )


class _Columns:
    """Columns of one row."""

    def __init__(self, section: DataSection, row: Row):
        """Set up the search for columns, unless flags of the section name them."""
        self.section = section
        self.row = row
        self.truth = _truth(row.get(TRUTH[0]))
        self.found = {
            name.lower(): name
            for name, value in row.items()
            if value is not None and (name != TRUTH[0] or self.truth is not None)
        }
        """Name in lower case -> column, of those that are not null."""

    @property
    def has_default_columns(self) -> bool:
        """Return whether the row has the columns that are the default: input and label."""
        is_named = self.section.input_key is not None or "instruction" in self.found
        return not is_named and {"input", LABEL} <= self.row.keys()

    @property
    def label(self) -> str | None:
        """Return the column of the answer if a flag names it, or if it is the default."""
        is_default = self.has_default_columns or (
            self.section.input_key is not None and LABEL in self.row
        )
        return self.section.label_key or (LABEL if is_default else None)

    @property
    def chat(self) -> str | None:
        """Return the column with a whole conversation."""
        names = [self.found[name] for name in CHATS if name in self.found]
        values = {name: self.row[name] for name in names}
        for name, value in values.items():
            if objects_in_text(value) if isinstance(value, str) else _may_ask(value):
                return name
        return None

    def first(
        self, lines: Sequence[Sequence[str]], flag: str, *, texts: bool = False
    ) -> str | None:
        """Return the column of the first line that the row has one of; None if it has none.

        `texts` takes only texts and messages. Raise ValueError for two of a line that differ.
        """
        for line in lines:
            names = [self.found[name] for name in line if name in self.found]
            names = [name for name in names if not texts or _may_ask(self.row[name])]
            if any(self.row[name] != self.row[names[0]] for name in names[1:]):
                raise ValueError(
                    f"each of the columns {', '.join(names)} could be the"
                    f" {'prompt' if flag == 'input_key' else 'answer'}, and they differ; name one"
                    f" with --{flag}"
                )
            if names:
                return names[0]
        return None

    def prompt(
        self, *, needed: bool = True, alone: bool = False
    ) -> tuple[str | list[Message] | None, tuple[str, ...]]:
        """Return the prompt and its columns; None if there is none and it is not `needed`.

        `alone` says that the answers are conversations.
        """
        if (name := self.section.input_key) is not None:
            if self.row.get(name) is None and not needed:
                return None, ()
            column(self.row, name, "input_key", may_be_empty=True)
            contexts = [self.found.get(each) for each in PROMPTS.get(name.lower(), ())]
            if unread := [each for each in contexts if each and _says(self.row[each])]:
                _warn(f"--input_key {name}: {unread[0]!r} is not a part of the prompt")
            return self.named(name)

        contexts = PROMPTS["instruction"] if "instruction" in self.found else ()
        names = ["input"]
        if not self.has_default_columns:
            names = [name for name in PROMPTS if name not in contexts]
        name = self.first([names], "input_key", texts=True)
        if name:
            return self.joined(name)

        chat = None if alone else self.chat
        if chat is None and not needed:
            return None, ()
        if chat is None and "input" not in self.row:
            column(self.row, "input", "input_key")
        return self.named(chat or "input")

    def named(self, name: str) -> tuple[str | list[Message], tuple[str, ...]]:
        """Return the prompt that is in one column."""
        return self.checked(prompt_value(self.section, self.row[name], name)), (name,)

    def joined(self, name: str) -> tuple[str | list[Message], tuple[str, ...]]:
        """Return the prompt of a column, with the other columns that belong to it."""
        value = prompt_value(self.section, self.row[name], name)
        contexts = PROMPTS[name.lower()]
        others = [self.found[each] for each in contexts if each in self.found]
        systems = [each for each in SYSTEMS if _says(self.row.get(each))][:1]
        turns = None if self.has_default_columns else _turns(self.row.get(EARLIER))
        history = [EARLIER] if turns else []

        # What is left out here would be missing from the question.
        unread = [each for each in others if not isinstance(self.row[each], str)]
        options = [each for name, each in self.found.items() if CHOICES.fullmatch(name)]
        options = [each for each in options if self.row[each] and each != self.label]
        unread += options if contexts else []
        unread += [each for each in systems if not isinstance(self.row[each], str)]
        unread += [each for each in others if isinstance(value, list) and _says(self.row[each])]
        if unread:
            raise ValueError(
                f"the column {unread[0]!r} belongs to the question in {name!r}, and cannot be"
                " written after it; write the prompt in one column, and name it with --input_key"
            )

        if isinstance(value, str):
            before = [] if self.section.apply_chat_template else systems
            texts = [*(self.row[each] for each in before), value, *map(self.row.get, others)]
            value = self.checked("\n\n".join(filter(_says, texts)))
        if history:
            now = [{"role": "user", "content": value}] if isinstance(value, str) else value
            value = [*prompt_value(self.section, turns, EARLIER), *now]
        return value, (*systems, *history, name, *others)

    def checked(self, value: str | list[Message]) -> str | list[Message]:
        """Return a prompt. Raise ValueError for an empty text without media."""
        media = [self.row.get(name) for name in media_columns(self.section).values()]
        if not _says(value) and not any(media):
            raise ValueError("the prompt is empty")
        return value


def _truth(value: Any) -> Any:
    """Return the right answer in verl's column, which may be JSON text; None if it has none."""
    value = parsed(value, TRUTH[0]) if isinstance(value, str) and TRUTH[1] in value else value
    return value.get(TRUTH[1]) if isinstance(value, Mapping) else None


def _says(value: Any) -> bool:
    """Return whether a value is messages, or a text that is not empty."""
    return not is_blank(value) if isinstance(value, str) else isinstance(value, list)


def _turns(history: Any) -> Any:
    """Return pairs of texts as messages, and messages as they are; both may be JSON text."""
    if isinstance(history, str):
        history = parsed(history, EARLIER) if history.strip() else None
    if not isinstance(history, list) or not all(isinstance(turn, list) for turn in history):
        return history
    if not all(len(turn) == 2 and all(isinstance(text, str) for text in turn) for turn in history):
        raise ValueError(f"{EARLIER!r} is not pairs of texts: {shortened(history)}")
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text}
        for turn in history
        for role, text in zip(roles, turn, strict=True)
    ]
