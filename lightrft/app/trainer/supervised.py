"""Train on given examples: each step takes rows of the data, and a task makes a loss of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from lightrft.app.trainer.base import Trainer, TrainingData
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm
from lightrft.core.samples import Answer, Prompt
from lightrft.core.step import StepRecord
from lightrft.data.rendering.tokens import marked_texts

MOST_EXAMPLES = 6
"""Rows of the first step that are shown with what is learned of them."""


class Task(Protocol):
    """A loss on examples for a trainer to minimise."""

    def __call__(self, prompts: Sequence[Prompt], *, max_tokens: int) -> LossTerm:
        """Return this rank's share of the loss on all ranks' examples.

        Micro-batches have at most `max_tokens` tokens. All ranks call it with the same examples,
        and all make the same plan.
        """
        ...


@dataclass(eq=False, kw_only=True)
class SupervisedTrainer(Trainer):
    """Takes one optimizer step over `train_batch_size` rows in each step."""

    task: Task
    answer: Callable[[nn.Module, int, Metrics], None] | None = None
    """Answers and scores the prompts of --eval_generate after a step."""

    def __post_init__(self, training_data: TrainingData) -> None:
        super().__post_init__(training_data)
        self.order = self.prompts.order(self.strategy.data_order, self.config.train.seed)

    def step(self, number: int) -> StepRecord:
        train = self.config.train
        # The order is a function of seed and position, so resuming needs no state of a reader.
        with self.trace.phase("data", idle=True):
            rows = self.order.rows((number - 1) * train.train_batch_size, train.train_batch_size)
            prompts = [self.prompts[row] for row in rows]
            term = self.task(prompts, max_tokens=train.max_tokens_per_microbatch)
        if number == 1 and self.strategy.mesh.world.rank == 0:
            self.observer.samples(number, list(self._examples(prompts[:MOST_EXAMPLES])))

        with self.trace.phase("train"):
            self.metrics.mean("train/learning_rate", self.role.scheduler.get_last_lr()[0])
            loss, norm = self.role.learn([term], self.metrics)

        self.loss = float(loss)
        self.metrics.mean("train/loss", loss)
        self.metrics.mean("train/grad_norm", norm)
        self.metrics.sum("train/tokens", term.batch.num_tokens)
        return StepRecord(term.batch, [term.rows], [loss])

    def _examples(self, prompts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
        """Yield rows of samples.jsonl in which ⟦ and ⟧ enclose what is learned."""
        for group, prompt in enumerate(prompts):
            for name, answer in prompt.columns.items():
                if isinstance(answer, Answer):
                    texts = marked_texts("", [answer], self.tokenizer)
                    said = "".join(f"⟦{text}⟧" if learned else text for text, learned in texts)
                    row = {"group": group, "prompt": prompt.text, "response": said}
                    label = name.removeprefix("label")
                    yield row | {"label": label, "length": len(answer.token_ids)}

    def evaluate(self) -> None:
        """Add the loss on the held-out rows, and the task's other metrics, as `eval/*`.

        So are the numbers of the responses to the prompts of --eval_generate.
        """
        if self.config.data.eval_data:
            term = self.task(self.eval_prompts, max_tokens=self.config.train.most_logprob_tokens)
            self.metrics.mean("eval/loss", self.role.measure(term, self.metrics))
        if self.answer is not None:
            self.answer(self.role.module, self.done, self.metrics)

    def enough(self) -> bool:
        stop = self.config.train.stop_loss
        if stop is None or not self.loss < stop:
            return False
        self.strategy.print(
            f"the loss of step {self.done}, {self.loss:.4g}, is below --stop_loss {stop:g}: the run"
            " ends here"
        )
        return True
