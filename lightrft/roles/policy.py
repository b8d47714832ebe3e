"""The policy: the actor that learns, with the reference model it must not stray far from."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms.reduce import Denominator
from lightrft.models.heads import Actor
from lightrft.observe.metrics import Metrics
from lightrft.roles.microbatch import Rows, infer, micro_batches
from lightrft.strategy import StrategyBase
from lightrft.types import Batch

Objective = Callable[[Tensor, Any, Denominator], tuple[Tensor, dict[str, Tensor]]]
"""(log-probs [T], batch, denominator) -> this micro-batch's share of the loss [], and reports [T] by metric name."""


class Policy:
    """Log-probs and updates of the actor, and log-probs of the frozen reference."""

    def __init__(
        self,
        strategy: StrategyBase,
        actor: Actor,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        *,
        reference: Actor | None = None,
        temperature: float = 1.0,
    ):
        self.strategy = strategy
        self.actor, self.optimizer, self.scheduler = actor, optimizer, scheduler
        self.reference = reference
        self.temperature = temperature

    def logprobs(self, batch: Batch, rows: Rows) -> Tensor:
        """log p of every learned token under the actor, 0 elsewhere: [T] float32 on the host."""
        return self._infer(self.actor, batch, rows)

    def reference_logprobs(self, batch: Batch, rows: Rows) -> Tensor:
        """The same under the reference model."""
        if self.reference is None:
            raise ValueError("this policy has no reference model; build it with one (--use_kl_loss)")
        return self._infer(self.reference, batch, rows)

    def update(
        self, batch: Batch, rows: Rows, objective: Objective, denominator: Denominator, metrics: Metrics
    ) -> tuple[Tensor, Tensor]:
        """One optimizer step over the given micro-batches; returns the global loss and the gradient norm before clipping.

        Reports are averaged over learned tokens; those whose name ends in `_max` are reduced by max.
        """
        self.actor.train()
        total = torch.zeros((), device=self.strategy.device)
        for index, micro_batch in enumerate(micro_batches(batch, rows, self.strategy.device)):
            logprobs, entropy = self.actor(micro_batch, self.temperature)
            loss, report = objective(logprobs, micro_batch, denominator)
            self.strategy.backward(loss, self.actor, self.optimizer, last=index == len(rows) - 1)
            total += loss.detach()
            for name, values in (report | {"train/entropy": entropy.detach()}).items():
                if name.endswith("_max"):
                    metrics.max(name, values, micro_batch.loss_mask)
                else:
                    metrics.mean(name, values, micro_batch.loss_mask)
        norm = self.strategy.optimizer_step(self.optimizer, self.actor, self.scheduler, name="actor")
        return self.strategy.mesh.data.sum(total), norm

    def denominator(self, batch: Batch, rows: Rows, *, length: int) -> Denominator:
        """Learned tokens and sequences of one optimizer step over all ranks; one collective."""
        mine = batch.select([row for members in rows for row in members])
        learned = torch.zeros(len(mine)).index_add(0, mine.sequence_ids, mine.loss_mask.float())
        counts = self.strategy.mesh.data.sum(torch.stack([mine.num_loss_tokens, (learned > 0).sum(dtype=torch.float32)]))
        tokens, sequences = counts.to(self.strategy.device)
        return Denominator(tokens, sequences, length)

    def _infer(self, model: Actor, batch: Batch, rows: Rows) -> Tensor:
        model.eval()
        return infer(lambda micro_batch: model(micro_batch, self.temperature)[0], batch, rows, self.strategy.device)
