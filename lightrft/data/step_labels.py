"""Answers in steps that are judged one by one, for process reward models."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.config.sections import DataSection, PreferenceSection
from lightrft.core.batch import JudgedBatch
from lightrft.core.samples import Answer, Expand, Prompt, TokenIds
from lightrft.data.conversations import flat_columns, text_answer
from lightrft.data.preferences import ANSWER, load_judged
from lightrft.data.prompt_set import PromptSet
from lightrft.data.prompts import RowContext, built_prompt
from lightrft.data.rendering.forms import Reading, judged_steps
from lightrft.data.rendering.messages import is_blank
from lightrft.data.step_ends import StepEnds

TARGETS = "targets"
"""Column of a loaded answer: the label of each step, from 0 to 1."""


def load_steps(
    section: DataSection, preference: PreferenceSection, tokenizer: Tokenizer, **options: Any
) -> PromptSet:
    """Load prompts with an Answer of steps, as load_judged() does.

    The separator joins the steps, and the end token
    follows the last one. The last token of each step is learned.
    """
    separator = section.step_separator
    step_ends = StepEnds(tokenizer, separator)

    def make(context: RowContext, row: dict[str, Any]) -> Prompt:
        reading = judged_steps(context.section, row, preference)
        steps = _steps(reading)
        targets = _labels(reading)
        if len(steps) != len(targets):
            raise ValueError(f"the row has {len(steps)} steps but {len(targets)} labels")

        prompt = built_prompt(context, row, reading.prompt, {})
        text = separator.join(step.removesuffix(separator) for step in steps)
        token_ids = text_answer(context, prompt.text, text).token_ids

        # A label belongs to a step, so the search that scores responses must find the same steps.
        ends = step_ends(token_ids)
        if len(ends) != len(steps):
            raise ValueError(
                f"the row has {len(steps)} steps, but --step_separator {separator!r} divides their"
                f" text into {len(ends)}"
            )

        answer = Answer(TokenIds(token_ids), [index in ends for index in range(len(token_ids))])
        return replace(prompt, columns={ANSWER: answer, TARGETS: targets})

    return load_judged(section, preference, tokenizer, make=make, read=judged_steps, **options)


def step_batch(
    answers: Sequence[Prompt], rows: Sequence[int], expand: Expand | None = None
) -> JudgedBatch:
    """Build the flat batch of the answers. `rows` has the index of each in the whole batch."""
    columns = flat_columns([(prompt, prompt.columns[ANSWER]) for prompt in answers], expand)
    targets = torch.zeros(len(columns["input_ids"]))
    targets[columns["loss_mask"]] = torch.tensor(
        [label for prompt in answers for label in prompt.columns[TARGETS]]
    )
    return JudgedBatch(**columns, rows=torch.tensor(rows, dtype=torch.int64), targets=targets)


def _steps(reading: Reading) -> list[str]:
    (steps,) = reading.answers
    if not isinstance(steps, list) or not all(
        isinstance(step, str) and not is_blank(step) for step in steps
    ):
        raise ValueError(
            f"{reading.names[0]!r} (--completion_key) must be a list of texts, the steps, not"
            f" {steps!r}"
        )
    return steps


def _labels(reading: Reading) -> list[float]:
    labels = reading.label
    if not isinstance(labels, list) or not all(
        isinstance(label, bool | int | float) and 0 <= label <= 1 for label in labels
    ):
        raise ValueError(
            f"{reading.names[1]!r} (--label_key) must be a list of true, false or numbers from 0 to"
            f" 1, not {labels!r}"
        )

    return [float(label) for label in labels]
