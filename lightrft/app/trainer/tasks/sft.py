"""Supervised fine-tuning on prompts with answers.

It is a complete task, or a loss that PPO adds (PTX, InstructGPT).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.algorithms.objectives import PtxObjective, sft
from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.roles.teacher import TeacherOfTokens
from lightrft.app.run.run import Run
from lightrft.app.trainer.tasks.examples import known_denominator, local_batch
from lightrft.core.batch import Batch, Rows
from lightrft.core.losses import Denominator
from lightrft.core.order import Order
from lightrft.core.role import LossTerm
from lightrft.core.samples import Prompt
from lightrft.data.conversations import supervised_batch
from lightrft.data.loader import Blend


def term_of_tokens(run: Run, prompts: Sequence[Prompt], *, max_tokens: int) -> LossTerm:
    """Learn answers to prompts; the loss is the mean over all answer tokens of a step."""
    batch, rows, denominator = supervised_share(run, prompts, max_tokens=max_tokens)
    return LossTerm(batch, rows, sft, denominator)


@dataclass(eq=False)
class PtxLoss:
    """Yields supervised batches, one for each optimizer step, with as many rows as samples.

    The rows have an order of their own, and checkpoints save the position in it.
    """

    run: Run
    policy: Policy
    prompts: Sequence[Prompt]
    order: Order | Blend
    """Order of the rows."""
    teacher: TeacherOfTokens | None = None
    """Teacher whose distributions over the answers are learned; None learns their tokens."""

    def __post_init__(self) -> None:
        algorithm = self.run.config.algorithm
        self.num_candidates = min(algorithm.distill_top_k, self.policy.vocabulary_size)
        beta = None if self.teacher is None else algorithm.distill_beta
        self.objective = PtxObjective(algorithm.ptx_coef, beta)
        self.num_batches = 0

    def next(self) -> LossTerm:
        """Return the next batch, averaged over the answer tokens of all ranks."""
        # Answers have another number of tokens than the samples, so they count separately.
        train = self.run.config.train
        size = train.train_batch_size
        prompts = [self.prompts[row] for row in self.order.rows(self.num_batches * size, size)]
        self.num_batches += 1
        batch, rows, denominator = supervised_share(
            self.run, prompts, max_tokens=train.max_tokens_per_microbatch
        )

        forward = self.policy.supervised
        if self.teacher is not None:
            # Both sides have the temperature of the samples.
            forward = self.policy.forward
            batch.teacher_logprobs, batch.candidates = self.teacher.likeliest(
                batch, rows, self.num_candidates
            )
        return LossTerm(batch, rows, self.objective, denominator, forward)

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_batches = state["taken"]


def supervised_share(
    run: Run, prompts: Sequence[Prompt], *, max_tokens: int
) -> tuple[Batch, Rows, Denominator]:
    """Return this rank's balanced share of all ranks' answers, the micro-batches, and the
    denominator of the learned tokens of all ranks."""
    batch, micro_batches, _ = local_batch(run, supervised_batch, prompts, max_tokens=max_tokens)

    # All ranks know all rows. The first token of a sequence is never learned.
    answered = [(prompt, prompt.columns["label"]) for prompt in prompts]
    learned = [sum(each.learned[0 if prompt.num_tokens else 1 :]) for prompt, each in answered]
    sequences = sum(count > 0 for count in learned)
    return batch, micro_batches, known_denominator(sum(learned), sequences, run.strategy.device)
