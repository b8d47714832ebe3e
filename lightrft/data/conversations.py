"""Supervised examples: a prompt and the answer to learn."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lightrft.config.sections import DataSection
from lightrft.core.batch import Batch
from lightrft.core.samples import Answer, Expand, Expanded, Prompt, TokenIds
from lightrft.data.chats import conversation_tokens
from lightrft.data.prompts import (
    RowContext,
    built_prompt,
    chat_of,
    complete_chat,
    load_prompts,
    row_media,
    with_media_tokens,
)
from lightrft.data.rendering.forms import EARLIER, learned
from lightrft.data.rendering.messages import Message, is_answer, is_blank, weight_of
from lightrft.data.rendering.template import chat_template
from lightrft.data.rendering.tokens import consecutive_tokens, without_ends


def make_example(context: RowContext, row: dict[str, Any]) -> Prompt:
    """Build a prompt whose `label` is the Answer that is learned.

    The prompt of a conversation ends where the first learned turn begins. Raise ValueError for a
    bad row.
    """
    reading = learned(context.section, row)
    (answer,) = reading.answers or (None,)
    if reading.answers and not can_be_learned(answer):
        raise ValueError(
            f"no text to train on in the answer column (--label_key): {answer!r:.100}; the row has"
            f" {', '.join(row)}"
        )
    return learned_example(context, row, reading.prompt, answer)


def row_of_each_turn(section: DataSection, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each turn that is learned, which ends with it; without --expand_turns the row.

    A chat template then renders each turn as the model saw it when it was the last one.
    """
    if not section.expand_turns:
        return [row]
    reading = learned(section, row)
    (messages,) = reading.answers or (reading.prompt,)
    if not isinstance(messages, list):
        return [row]

    name = (reading.names or reading.columns)[-1]
    # The messages of a whole conversation begin with the earlier turns.
    changed = row if reading.answers else row | {EARLIER: None}
    turns = enumerate(messages, 1)
    ends = [end for end, turn in turns if is_answer(turn) and weight_of(turn) is not False]
    return [changed | {name: messages[:end]} for end in ends] or [row]


load_examples = partial(load_prompts, make=make_example, read=learned, parts=row_of_each_turn)
"""Function that loads prompts with answers, as load_prompts() does; rows without are bad rows."""


def learned_example(
    context: RowContext, row: Mapping[str, Any], prompt: Any, answer: str | list[Message] | None
) -> Prompt:
    """Build a prompt whose `label` is learned, from text or messages and the answer to them.

    Without an answer, the turns of the assistant in the prompt are learned. Raise ValueError for a
    bad row.
    """
    section = context.section
    if not section.apply_chat_template:
        if isinstance(answer, list):
            raise ValueError("the answer is a list of messages, which need --apply_chat_template")
        example = built_prompt(context, row, prompt, {})
        example.columns["label"] = text_answer(context, example.text, answer)
        return example

    turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer or []
    messages = [*chat_of(section, prompt), *turns]
    if not is_answer(messages[-1]):
        raise ValueError(
            f"the answer ends with a message of role {messages[-1]['role']!r}, not of the assistant"
        )

    media = row_media(context, row, messages)
    text, token_ids, label = conversation_tokens(
        chat_template(section, context.tokenizer),
        complete_chat(section, row, messages, media),
        sum(map(is_answer, turns or messages)),
        section,
    )
    return with_media_tokens(Prompt(0, text, token_ids, {"label": label}, media), context)


def can_be_learned(answer: Any) -> bool:
    """Return whether an answer is a text with something in it, or messages."""
    if isinstance(answer, str):
        return not is_blank(answer)
    return isinstance(answer, list) and bool(answer) and isinstance(answer[0], dict)


def text_answer(context: RowContext, prompt: str, answer: str) -> Answer:
    """Return the tokens of an answer as they follow the text of a prompt, with what ends a turn.

    All of them are learned.
    """
    section = context.section
    tokenizer = context.tokenizer
    ends = [tokenizer.eos_token]
    closing = ""
    if section.apply_chat_template:
        template = chat_template(section, tokenizer)
        ends = template.ends
        closing = template.closing.last

    answer = without_ends(answer, ends)
    pieces = consecutive_tokens(
        tokenizer, [prompt, answer + closing], special_tokens=not section.apply_chat_template
    )
    token_ids = pieces[1] if closing or not answer else [*pieces[1], tokenizer.eos_token_id]

    return Answer(TokenIds(token_ids), [True] * len(token_ids))


def supervised_batch(prompts: list[Prompt], rows: list[int], expand: Expand | None = None) -> Batch:
    """Build a batch of prompts with the answers. `rows` has the index of each in the whole batch.

    `expand` is for prompts with media; without it all prompts are text.
    """
    answered = [(prompt, prompt.columns["label"]) for prompt in prompts]
    return Batch(**flat_columns(answered, expand), rows=torch.tensor(rows, dtype=torch.int64))


def flat_columns(
    answered: Sequence[tuple[Prompt, Answer]], expand: Expand | None = None
) -> dict[str, Any]:
    """Return the columns of a flat batch, without `rows`: each prompt is followed by an answer.

    A prompt that occurs with several answers is expanded once. The first token of a sequence is
    never learned.
    """
    unique = {id(prompt): prompt for prompt, _ in answered}
    expanded = {key: expand(prompt) for key, prompt in unique.items()} if expand else {}
    read = [
        expanded[id(prompt)] if expand else Expanded(list(prompt.token_ids), {})
        for prompt, _ in answered
    ]
    both = [(each.token_ids, answer) for each, (_, answer) in zip(read, answered, strict=True)]
    masks = [[False] * len(prompt) + answer.learned for prompt, answer in both]

    learned = [value for mask in masks for value in (False, *mask[1:])]
    integers = partial(torch.tensor, dtype=torch.int64)

    return {
        "lengths": integers([len(prompt) + len(answer.token_ids) for prompt, answer in both]),
        "input_ids": integers([token for ids, each in both for token in (*ids, *each.token_ids)]),
        "loss_mask": torch.tensor(learned, dtype=torch.bool),
        "media": [each.features for each in read] if expand else None,
        "tower_tokens": integers([each.tower_tokens for each in read]) if expand else None,
    }
