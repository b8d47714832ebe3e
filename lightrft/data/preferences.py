"""Rows of judged answers.

They are pairs of a chosen and a rejected answer to one prompt, or single answers that are good or
bad.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.config.sections import DataSection, PreferenceSection
from lightrft.core.batch import JudgedBatch
from lightrft.core.samples import Answer, Expand, Prompt, TokenIds
from lightrft.data.conversations import can_be_learned, flat_columns, learned_example
from lightrft.data.prompt_set import PromptSet
from lightrft.data.prompts import Make, RowContext, load_prompts
from lightrft.data.rendering.forms import Reading, column, is_conversation, judged, pair
from lightrft.data.rendering.messages import DIALOGUE, Message, is_answer, turns_in_text

CHOSEN = "chosen"
REJECTED = "rejected"
MARGIN = "margin"
TIE = "tie"
HEAD = "head"
"""Columns of a loaded pair, whatever they are called in the data."""
DIFFERS = "the prompt in {!r} is not in the conversation of {!r}: make them the same, or remove the prompt"
ANSWER = "answer"
DESIRABLE = "desirable"
"""Columns of a loaded single answer."""


def load_pairs(
    section: DataSection,
    preference: PreferenceSection,
    tokenizer: Tokenizer,
    *,
    heads: Sequence[str] = (),
    **options: Any,
) -> PromptSet:
    """Load prompts with a chosen and a rejected Answer, as load_judged() does."""
    maker = pair_maker(preference, heads)
    options["requirements"] = [list(heads), options.get("requirements")]
    return load_judged(section, preference, tokenizer, make=maker, read=pair, **options)


def load_judged(
    section: DataSection,
    preference: PreferenceSection,
    tokenizer: Tokenizer,
    *,
    read: Callable[..., Reading],
    requirements: Any = None,
    **options: Any,
) -> PromptSet:
    """Load prompts with answers that are judged, as load_prompts() does, with its `options`."""
    return load_prompts(
        section,
        tokenizer,
        read=partial(read, preference=preference),
        requirements=[asdict(preference), requirements],
        **options,
    )


def pair_maker(preference: PreferenceSection, heads: Sequence[str] = ()) -> Make:
    """Return a function like make_prompt() that builds pairs from rows.

    `heads` has the names of the heads if there are several.
    """

    def make_pair(context: RowContext, row: dict[str, Any]) -> Prompt:
        reading = pair(context.section, row, preference)
        if reading.answers[0] == reading.answers[1]:
            raise ValueError("the chosen and the rejected answer are the same")

        prompt, *answers = _prompt_and_answers(context.section, row, reading)
        examples = [_example(context, row, prompt, answer) for answer in answers]
        judgement = {
            MARGIN: _margin(preference, row),
            TIE: _tie(preference, row),
            HEAD: _head(preference, row, heads),
        }

        return _pair(*examples, judgement)

    return make_pair


def pair_batch(
    pairs: Sequence[Prompt], rows: Sequence[int], expand: Expand | None = None
) -> JudgedBatch:
    """Build the flat batch of the pairs, chosen answers before rejected ones.

    `rows` has the index of each pair in the whole batch.
    """
    both = [each.columns for each in pairs for _ in (CHOSEN, REJECTED)]
    answers = [(each, each.columns[name]) for each in pairs for name in (CHOSEN, REJECTED)]
    numbers = [2 * row + answer for row in rows for answer in (0, 1)]
    return JudgedBatch(
        **flat_columns(answers, expand),
        rows=torch.tensor(numbers, dtype=torch.int64),
        margins=torch.tensor([columns[MARGIN] for columns in both], dtype=torch.float32),
        ties=torch.tensor([columns[TIE] for columns in both], dtype=torch.bool),
        heads=torch.tensor([columns[HEAD] for columns in both], dtype=torch.int64),
    )


def load_answers(
    section: DataSection, preference: PreferenceSection, tokenizer: Tokenizer, **options: Any
) -> PromptSet:
    """Load prompts with an Answer that is good or bad, as load_judged() does."""

    def make(context: RowContext, row: dict[str, Any]) -> Prompt:
        reading = judged(context.section, row, preference)
        prompt = reading.prompt
        (answer,) = reading.answers
        # The answer is what follows the last message of somebody else.
        if is_conversation(answer, prompt is None):
            last = max(number for number, message in enumerate(answer, 1) if not is_answer(message))
            prompt = answer[:last]
            answer = answer[last:]
            _check_prompt(reading, prompt)

        desirable = _bool(reading.label, reading.names[1], "label_key")
        example = _example(context, row, prompt, answer)
        return replace(example, columns={ANSWER: example.columns["label"], DESIRABLE: desirable})

    return load_judged(section, preference, tokenizer, make=make, read=judged, **options)


def mismatched(answers: Sequence[Prompt], max_tokens: int) -> list[Prompt]:
    """Return each prompt with the answer to the next one, cut to `max_tokens` in all.

    The last prompt gets the answer to the first one.
    """
    others = [*answers[1:], *answers[:1]]
    mixed = []
    for prompt, other in zip(answers, others, strict=True):
        answer = other.columns[ANSWER]
        longest = max_tokens - prompt.num_tokens
        answer = Answer(answer.token_ids[:longest], answer.learned[:longest])
        mixed.append(replace(prompt, columns={ANSWER: answer, DESIRABLE: False}))
    return mixed


def judged_batch(
    answers: Sequence[Prompt], rows: Sequence[int], expand: Expand | None = None
) -> JudgedBatch:
    """Build the flat batch of single answers. `rows` has the index of each in the whole batch."""
    return JudgedBatch(
        **flat_columns([(prompt, prompt.columns[ANSWER]) for prompt in answers], expand),
        rows=torch.tensor(rows, dtype=torch.int64),
        desirable=torch.tensor([prompt.columns[DESIRABLE] for prompt in answers], dtype=torch.bool),
    )


def _prompt_and_answers(
    section: DataSection, row: dict[str, Any], reading: Reading
) -> tuple[Any, Any, Any]:
    """Return the prompt and both answers.

    Whole conversations have the common beginning as the prompt.
    """
    first, second = reading.answers
    prompt = reading.prompt
    alone = prompt is None
    turns = [turns_in_text(each) for each in (first, second) if isinstance(each, str)]
    if len(turns) == 2 and all(turns):
        if not section.apply_chat_template:
            if not first.strip().startswith((prompt or "").strip()):
                raise ValueError(DIFFERS.format(reading.columns[-1], reading.names[0]))
            return _split_dialogues(first, second)
        first, second = turns

    if not (is_conversation(first, alone) and is_conversation(second, alone)):
        if alone:
            column(row, section.input_key or "input", "input_key")
        return prompt, first, second

    both = zip(first, second, strict=False)
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    after = [messages[count] if count < len(messages) else {} for messages in (first, second)]
    if not count or not all(map(is_answer, after)):
        raise ValueError(
            "both conversations must begin with the same messages, and then differ in a turn of the"
            " assistant"
        )

    _check_prompt(reading, first[:count])
    return first[:count], first[count:], second[count:]


def _check_prompt(reading: Reading, messages: list[Message]) -> None:
    """Raise ValueError if a row has a prompt that is not in its conversation."""
    prompt = [{"content": reading.prompt}] if isinstance(reading.prompt, str) else reading.prompt
    said = [str(each["content"]).strip() for each in messages]
    if any(str(each["content"]).strip() not in said for each in prompt or ()):
        raise ValueError(DIFFERS.format(reading.columns[-1], reading.names[0]))


def _split_dialogues(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two texts of HH-RLHF into the common beginning and both answers.

    The beginning ends with the last turn of the assistant that both texts open.
    """
    ends = [match.end() for match in DIALOGUE.finditer(chosen) if match[1] == "Assistant"]
    ends = [end for end in ends if chosen[:end] == rejected[:end]]
    if not ends:
        raise ValueError(
            "both texts must begin with the same turns, and then differ in a turn of the assistant"
        )
    return chosen[: ends[-1]], chosen[ends[-1] :], rejected[ends[-1] :]


def _example(context: RowContext, row: dict[str, Any], prompt: Any, answer: Any) -> Prompt:
    """Return the prompt of a row with one Answer as the label.

    Raise ValueError if it cannot be learned.
    """
    if isinstance(prompt, list) and is_answer(prompt[-1]):
        raise ValueError(
            "the prompt ends with a turn of the assistant, so it contains an answer; remove that"
            " message"
        )
    if not can_be_learned(answer):
        raise ValueError("one of the answers is empty, or neither text nor messages")
    return learned_example(context, row, prompt, answer)


def _pair(chosen: Prompt, rejected: Prompt, judgement: dict[str, Any]) -> Prompt:
    """Join two examples at the common prompt.

    A tokenizer may cut the end of the prompt differently before each answer.
    """
    both = zip(chosen.token_ids, rejected.token_ids, strict=False)
    shared = sum(1 for _ in takewhile(lambda tokens: tokens[0] == tokens[1], both))
    if not shared:
        raise ValueError("the prompt is empty")

    answers = {}
    for name, example in ((CHOSEN, chosen), (REJECTED, rejected)):
        rest = list(example.token_ids[shared:])
        answer = example.columns["label"]
        learned = [False] * len(rest) + answer.learned
        answers[name] = Answer(TokenIds([*rest, *answer.token_ids]), learned)

    return replace(chosen, token_ids=chosen.token_ids[:shared], columns=answers | judgement)


def _margin(preference: PreferenceSection, row: dict[str, Any]) -> float:
    if preference.margin_key is None:
        return 0.0

    margin = column(row, preference.margin_key, "margin_key")
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not abs(margin) < float("inf"):
        raise ValueError(
            f"{preference.margin_key!r} (--margin_key) must be a finite number, not {margin!r}"
        )

    return float(margin)


def _tie(preference: PreferenceSection, row: dict[str, Any]) -> bool:
    key = preference.tie_key
    return key is not None and _bool(column(row, key, "tie_key"), key, "tie_key")


def _bool(value: Any, name: str, flag: str) -> bool:
    if value not in (True, False):
        raise ValueError(f"{name!r} (--{flag}) must be true or false, not {value!r}")
    return bool(value)


def _head(preference: PreferenceSection, row: dict[str, Any], heads: Sequence[str]) -> int:
    if preference.head_key is None:
        return 0
    head = column(row, preference.head_key, "head_key")
    if head not in heads:
        raise ValueError(
            f"{preference.head_key!r} (--head_key) is {head!r}, not one of the heads"
            f" {', '.join(heads)}"
        )
    return list(heads).index(head)
