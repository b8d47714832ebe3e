"""Supervised fine-tuning on prompts with answers.

It is a complete task, or a loss that PPO adds (PTX, InstructGPT).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.algorithms.objectives import PtxObjective, sft
from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.roles.teacher import TeacherOfTokens
from lightrft.app.trainer.tasks.examples import known_denominator, plan_local_rows
from lightrft.config.sections import AlgorithmSection, TrainSection
from lightrft.core.batch import Batch, Rows
from lightrft.core.losses import Denominator
from lightrft.core.order import Order
from lightrft.core.role import LossTerm
from lightrft.core.samples import Expand, Prompt
from lightrft.data.conversations import supervised_batch
from lightrft.data.loader import Blend, check_batch
from lightrft.strategy.strategy import StrategyBase


class SFTTask:
    """Learns answers to prompts; the loss is the mean over all answer tokens of a step."""

    def __init__(self, policy: Policy, train: TrainSection, *, expand: Expand | None = None):
        """Set up the task. `expand` expands prompts with media."""
        self.policy = policy
        self.train = train
        self.expand = expand

    def term(self, prompts: Sequence[Prompt], *, max_tokens: int) -> LossTerm:
        """Return this rank's share of the loss on all ranks' prompts."""
        batch, rows, denominator = supervised_share(
            prompts, self.policy.strategy, self.train, max_tokens=max_tokens, expand=self.expand
        )
        return LossTerm(batch, rows, sft, denominator)


@dataclass(eq=False)
class PtxLoss:
    """Yields supervised batches, one for each optimizer step, with as many rows as samples.

    The rows have an order of their own, and checkpoints save the position in it. Raises DataError
    if there are too few rows.
    """

    policy: Policy
    prompts: Sequence[Prompt]
    order: Order | Blend
    """Order of the rows."""
    train: TrainSection
    algorithm: AlgorithmSection
    teacher: TeacherOfTokens | None = None
    """Teacher whose distributions over the answers are learned; None learns their tokens."""
    expand: Expand | None = None
    """Expands prompts with media."""

    def __post_init__(self) -> None:
        check_batch(len(self.prompts), self.train.train_batch_size)
        vocabulary = self.policy.vocabulary_size
        self.num_candidates = min(self.algorithm.distill_top_k, vocabulary)
        beta = None if self.teacher is None else self.algorithm.distill_beta
        self.objective = PtxObjective(self.algorithm.ptx_coef, beta)
        self.num_batches = 0

    def next(self) -> LossTerm:
        """Return the next batch, averaged over the answer tokens of all ranks."""
        # Answers have another number of tokens than the samples, so they count separately.
        size = self.train.train_batch_size
        prompts = [self.prompts[row] for row in self.order.rows(self.num_batches * size, size)]
        self.num_batches += 1
        most = self.train.max_tokens_per_microbatch
        batch, rows, denominator = supervised_share(
            prompts, self.policy.strategy, self.train, max_tokens=most, expand=self.expand
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
    prompts: Sequence[Prompt],
    strategy: StrategyBase,
    train: TrainSection,
    *,
    max_tokens: int,
    expand: Expand | None = None,
) -> tuple[Batch, Rows, Denominator]:
    """Return this rank's balanced share of all ranks' answers, the micro-batches, and the
    denominator of the learned tokens of all ranks."""
    answers = [prompt.columns["label"] for prompt in prompts]
    data = strategy.mesh.data
    local_rows, micro_batches = plan_local_rows(prompts, data, train, max_tokens=max_tokens)
    batch = supervised_batch([prompts[row] for row in local_rows], local_rows, expand)

    # All ranks know all rows. The first token of a sequence is never learned.
    answered = zip(prompts, answers, strict=True)
    learned = [sum(each.learned[0 if prompt.num_tokens else 1 :]) for prompt, each in answered]
    sequences = sum(count > 0 for count in learned)
    return batch, micro_batches, known_denominator(sum(learned), sequences, strategy.device)
