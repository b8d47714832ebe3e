"""Supervised examples: a prompt and the answer to learn."""

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config import TrainSection
from lightrft.data.packing import plan
from lightrft.parallel.collectives import Axis
from lightrft.types import Batch, Expand, Prompt


def answer_problem(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, longest: int) -> str | None:
    """Why a row cannot be learned from, with its end token in at most `longest` tokens; None when it can."""
    label = prompt.columns.get("label")
    if not isinstance(label, str) or not label:
        return f"no text to learn in the answer column (--label_key): {label!r}"
    length = prompt.num_tokens + len(answer_ids(label, tokenizer))
    if length > longest:
        return f"prompt and answer have {length} tokens, more than --max_tokens_per_microbatch {longest}"
    return None


def answer_ids(label: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What is learned."""
    return [*tokenizer(label, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def supervised_batch(
    prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, rows: list[int], expand: Expand | None = None
) -> Batch:
    """Prompt, answer and end token end to end; answer and end token are learned. `rows`: places in the whole batch.

    `expand` is for prompts with images; without it all are text.
    """
    expanded = [expand(prompt) for prompt in prompts] if expand else None
    asked = [each.token_ids for each in expanded or prompts]
    pairs = [(prompt, answer_ids(each.columns["label"], tokenizer)) for prompt, each in zip(asked, prompts, strict=True)]
    learned = [part for prompt, answer in pairs for part in ([False] * len(prompt), [True] * len(answer))]
    return Batch(
        lengths=torch.tensor([len(prompt) + len(answer) for prompt, answer in pairs], dtype=torch.int64),
        input_ids=torch.tensor([token for prompt, answer in pairs for token in prompt + answer], dtype=torch.int64),
        loss_mask=torch.tensor([value for part in learned for value in part], dtype=torch.bool),
        rows=torch.tensor(rows, dtype=torch.int64),
        media=[each.features for each in expanded] if expand else None,
    )


def supervised_part(
    prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, axis: Axis, train: TrainSection, *, expand: Expand | None = None
) -> tuple[Batch, list[list[int]]]:
    """This rank's share of the prompts and answers of all, balanced, and its micro-batches."""
    schedule = plan(
        [prompt.num_tokens + len(answer_ids(prompt.columns["label"], tokenizer)) for prompt in prompts],
        num_ranks=axis.size,
        minibatch_size=len(prompts),
        max_tokens=train.max_tokens_per_microbatch,
        max_sequences=train.micro_train_batch_size,
        batching=train.batching,
    )
    mine = schedule.rows(axis.rank)
    batch = supervised_batch([prompts[row] for row in mine], tokenizer, mine, expand)
    return batch, schedule.local(axis.rank)[0]
