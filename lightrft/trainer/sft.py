"""Supervised fine-tuning: learn the answer column; the loss is the mean over all answer tokens of a step."""

from typing import Any

from lightrft.algorithms.objectives import sft
from lightrft.roles.microbatch import MicroBatchIndices
from lightrft.trainer.base import Trainer
from lightrft.trainer.supervised import supervised_part
from lightrft.types import Batch, Prompt


class SFTTrainer(Trainer):
    """Trainer whose step is one optimizer step over `train_batch_size` rows."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.order = self.prompts.order(self.strategy.data_order, self.config.train.seed)

    def step(self, number: int) -> None:
        with self.trace.phase("data"):
            size = self.config.train.train_batch_size
            batch, rows = self._my_part([self.prompts[row] for row in self.order.rows((number - 1) * size, size)])
        with self.trace.phase("train"):
            denominator = self.policy.denominator(batch, rows, length=1)
            self.metrics.mean("train/learning_rate", self.policy.scheduler.get_last_lr()[0])
            loss, norm = self.policy.update(batch, rows, sft, denominator, self.metrics)
        self.loss = float(loss)
        self.metrics.mean("train/loss", loss)
        self.metrics.mean("train/grad_norm", norm)
        self.metrics.sum("train/tokens", batch.num_tokens)

    def evaluate(self) -> None:
        """Add the negative log-likelihood of the held-out answers, mean over their tokens."""
        batch, rows = self._my_part(self.eval_prompts)
        self.metrics.mean("eval/loss", -self.policy.logprobs(batch, rows), batch.loss_mask)

    def enough(self) -> bool:
        stop = self.config.train.stop_loss
        return stop is not None and self.loss < stop

    def _my_part(self, prompts: list[Prompt]) -> tuple[Batch, MicroBatchIndices]:
        return supervised_part(prompts, self.tokenizer, self.strategy.mesh.data, self.config.train, expand=self.expand)
