"""Supervised fine-tuning: learn the answer column, mean over all answer tokens of a step."""

from lightrft.algorithms.objectives import sft
from lightrft.data.conversations import supervised_batch
from lightrft.data.packing import plan
from lightrft.trainer.base import Trainer
from lightrft.types import Prompt


class SFTTrainer(Trainer):
    """One step is one optimizer step over `train_batch_size` rows."""

    def __init__(self, *args, prompts: list[Prompt], **kwargs):
        super().__init__(*args, **kwargs)
        self.prompts = prompts

    def step(self, number: int) -> None:
        data, train = self.strategy.mesh.data, self.config.train
        rows = self.order.rows(number - 1)
        with self.trace.phase("data"):
            batch = supervised_batch([self.prompts[row] for row in rows], self.tokenizer, list(range(len(rows))))
            schedule = plan(
                batch.lengths.tolist(),
                num_ranks=data.size,
                minibatch_size=train.train_batch_size,
                max_tokens=train.max_tokens_per_microbatch,
                max_sequences=train.micro_train_batch_size,
            )
            mine, micro_batches = batch.select(schedule.rows(data.rank)), schedule.local(data.rank)[0]
        with self.trace.phase("train"):
            denominator = self.policy.denominator(mine, micro_batches, length=1)
            self.metrics.mean("train/learning_rate", self.policy.scheduler.get_last_lr()[0])
            loss, norm = self.policy.update(mine, micro_batches, sft, denominator, self.metrics)
        self.metrics.mean("train/loss", loss)
        self.metrics.mean("train/grad_norm", norm)
        self.metrics.sum("train/tokens", mine.num_tokens)
