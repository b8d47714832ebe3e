"""Teachers of on-policy distillation: what other models say about the tokens of the actor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lightrft.core.batch import Batch, Experience, Rows, token_index
from lightrft.models.parallel.collectives import Axis
from lightrft.strategy.batching.micro_batches import regroup
from lightrft.strategy.batching.planner import Batching


class Teacher(Protocol):
    """A model that returns log-probs: a Policy, or a RemoteTeacher. All ranks call it together."""

    def logprobs(self, batch: Batch, rows: Rows) -> Tensor:
        """Return log p of every learned token of a flat batch, 0 elsewhere.

        It is [T] float32 on the host.
        """


class TeacherOfTokens(Teacher, Protocol):
    """A teacher that also names the likeliest tokens: a Policy, but no RemoteTeacher."""

    def likeliest(self, batch: Batch, rows: Rows, k: int) -> tuple[Tensor, Tensor]:
        """Return the k likeliest ids in the place of each learned token; see Policy."""


@dataclass(eq=False)
class Teachers:
    """Several teachers as one, each for samples of its own; they may see prompts of their own.

    The experience says which teacher scores a sample (`teachers`), and what it sees in place of the
    prompt (`teacher_prompts`). The response is the same, so its tokens keep their positions in it.
    """

    teachers: Sequence[Teacher]
    data: Axis
    max_tokens: int
    """Largest number of tokens of a micro-batch."""
    batching: Batching

    def logprobs(self, batch: Experience, rows: Rows) -> Tensor:
        return self._ask(batch, lambda teacher, *arguments: teacher.logprobs(*arguments))

    def likeliest(self, batch: Experience, rows: Rows, k: int) -> tuple[Tensor, Tensor]:
        def ask(teacher: TeacherOfTokens, *arguments: Batch | Rows) -> Tensor:
            logprobs, ids = teacher.likeliest(*arguments, k)
            return torch.cat([logprobs, ids.float()], dim=1)  # exact below 2^24

        logprobs, ids = self._ask(batch, ask, 2 * k).tensor_split([k], dim=1)
        return logprobs, ids.int()

    def _ask(self, batch: Experience, ask: Callable[..., Tensor], *shape: int) -> Tensor:
        """Return what each sample's teacher says about the tokens of the response.

        It is [T, *shape], and 0 elsewhere.
        """
        # The experts of a record are the actor's, for the actor's prompt.
        batch = replace(batch, experts=None)
        result = torch.zeros(batch.num_tokens, *shape)
        for number, teacher in enumerate(self.teachers):
            members = torch.arange(len(batch))
            if batch.teachers is not None:
                members = members[batch.teachers == number]
            asked = batch.select(members)
            tokens = token_index(batch.offsets, members)
            scored = asked
            answered = torch.ones(len(tokens), dtype=torch.bool)
            if asked.teacher_prompts is not None:
                scored = with_teacher_prompts(asked)
                answered = response_mask(scored, teacher_prompt_lengths(asked))
                tokens = tokens[response_mask(asked, asked.prompt_lengths)]

            rows = regroup(self.data, scored, max_tokens=self.max_tokens, batching=self.batching)
            if rows:  # on all ranks, or on none
                result[tokens] = ask(teacher, scored, rows)[answered]

        return result


def with_teacher_prompts(batch: Experience) -> Batch:
    """Return the responses of a batch after the prompts that the teacher sees.

    Nothing else of the batch remains than what a model of text reads.
    """
    prompt_lengths = teacher_prompt_lengths(batch)
    lengths = prompt_lengths + batch.lengths - batch.prompt_lengths
    num_tokens = int(lengths.sum())
    zeros = torch.zeros(num_tokens, dtype=torch.bool)
    scored = Batch(lengths, zeros.long(), zeros.clone(), batch.rows)

    here = response_mask(scored, prompt_lengths)
    there = response_mask(batch, batch.prompt_lengths)
    scored.input_ids[here] = batch.input_ids[there]
    scored.input_ids[~here] = batch.teacher_prompts[batch.teacher_prompts >= 0].long()
    scored.loss_mask[here] = batch.loss_mask[there]
    if batch.early is not None:
        scored.early = zeros.clone()
        scored.early[here] = batch.early[there]
    return scored


def teacher_prompt_lengths(batch: Experience) -> Tensor:
    """Return the number of tokens of the prompt that the teacher sees: [N] int64."""
    return (batch.teacher_prompts >= 0).sum(1)


def response_mask(batch: Batch, prompt_lengths: Tensor) -> Tensor:
    """Return True at the tokens after the prompts, whose lengths are [N]: [T] bool."""
    return batch.position_ids >= torch.repeat_interleave(prompt_lengths, batch.lengths)
