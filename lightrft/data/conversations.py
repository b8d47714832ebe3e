"""Supervised examples: a prompt and the answer to learn."""

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.types import Batch, Prompt


def answer_problem(prompt: Prompt) -> str | None:
    """Why a row cannot be learned from; None when it can."""
    label = prompt.columns.get("label")
    if not isinstance(label, str) or not label:
        return f"no text to learn in the answer column (--label_key): {label!r}"
    return None


def supervised_batch(prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, rows: list[int]) -> Batch:
    """Prompt, answer and end token end to end; answer and end token are learned. `rows`: places in the whole batch."""
    answers = [tokenizer(p.columns["label"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for p in prompts]
    return Batch(
        lengths=torch.tensor([len(p.token_ids) + len(a) for p, a in zip(prompts, answers, strict=True)]),
        input_ids=torch.tensor([t for p, a in zip(prompts, answers, strict=True) for t in p.token_ids + a]),
        loss_mask=torch.tensor([m for p, a in zip(prompts, answers, strict=True) for m in [False] * len(p.token_ids) + [True] * len(a)]),
        rows=torch.tensor(rows),
    )
