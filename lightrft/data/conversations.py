"""Supervised examples: a prompt and the answer to learn."""

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config import TrainSection
from lightrft.data.packing import plan
from lightrft.parallel.collectives import Axis
from lightrft.types import Batch, Prompt


def answer_problem(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, longest: int) -> str | None:
    """Why a row cannot be learned from, with its end token in at most `longest` tokens; None when it can."""
    label = prompt.columns.get("label")
    if not isinstance(label, str) or not label:
        return f"no text to learn in the answer column (--label_key): {label!r}"
    length = len(prompt.token_ids) + len(answer_ids(label, tokenizer))
    if length > longest:
        return f"prompt and answer have {length} tokens, more than --max_tokens_per_microbatch {longest}"
    return None


def answer_ids(label: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What is learned."""
    return [*tokenizer(label, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def supervised_batch(prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, rows: list[int]) -> Batch:
    """Prompt, answer and end token end to end; answer and end token are learned. `rows`: places in the whole batch."""
    pairs = [(prompt.token_ids, answer_ids(prompt.columns["label"], tokenizer)) for prompt in prompts]
    learned = [part for prompt, answer in pairs for part in ([False] * len(prompt), [True] * len(answer))]
    return Batch(
        lengths=torch.tensor([len(prompt) + len(answer) for prompt, answer in pairs], dtype=torch.int64),
        input_ids=torch.tensor([token for prompt, answer in pairs for token in prompt + answer], dtype=torch.int64),
        loss_mask=torch.tensor([value for part in learned for value in part], dtype=torch.bool),
        rows=torch.tensor(rows, dtype=torch.int64),
    )


def supervised_part(
    prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, axis: Axis, train: TrainSection
) -> tuple[Batch, list[list[int]]]:
    """This rank's share of the prompts and answers of all, balanced, and its micro-batches."""
    batch = supervised_batch(prompts, tokenizer, list(range(len(prompts))))
    schedule = plan(
        batch.lengths.tolist(),
        num_ranks=axis.size,
        minibatch_size=len(batch),
        max_tokens=train.max_tokens_per_microbatch,
        max_sequences=train.micro_train_batch_size,
        batching=train.batching,
    )
    return batch.select(schedule.rows(axis.rank)), schedule.local(axis.rank)[0]
