"""A model that learns, or only computes, in micro-batches that are planned over all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.core.batch import Batch, Rows, TrainingPlan, infer, micro_batches
from lightrft.core.losses import Denominator, Report, Reported, Weighted, sequence_sums
from lightrft.core.metrics import Metrics
from lightrft.core.strategy import Strategy

Forward = Callable[[Batch], Tensor]
"""Function that computes one value per token of a micro-batch."""
Objective = Callable[[Tensor, Any, Denominator], Reported]
"""(the role's values, batch, denominator) -> this micro-batch's share of the loss [], and reports
by metric name.
"""


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A term of the loss of an optimizer step: sequences in micro-batches, and an objective.

    The objective computes each micro-batch's share of the term.
    """

    batch: Batch
    rows: Rows
    objective: Objective
    denominator: Denominator
    forward: Callable[..., Reported] | None = None
    """Function that computes the input of the objective, and further reports; None: the role's."""


class Role(ABC):
    """A model under a strategy. It learns if it has an optimizer. All ranks call it together."""

    NAME: ClassVar[str] = "model"
    """Name in warnings."""
    mean_counts: Any = None
    """Counts that every denominator holds besides; see Denominator."""

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ):
        self.strategy = strategy
        self.module = module
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.left: int | None = None
        """Number of micro-batches of the open step still to come; None: no step is open."""
        self.batch: Batch | None = None
        """The newest micro-batch of the open step."""
        self.total = torch.zeros(())
        """This rank's share of the loss so far, []."""
        self.num_computed = 0
        """Number of tokens that micro-batches of training have computed so far."""
        self.num_learned = 0
        """Number of tokens among them that the head predicted."""

    @abstractmethod
    def forward(self, batch: Batch) -> Reported:
        """Return the input of objectives, and further reports."""

    def loss(self, batch: Batch, term: LossTerm) -> Reported:
        """Return a micro-batch's share of the loss, and reports.

        A model whose head can compute its gradients in the forward pass overrides this.
        """
        values, report = (term.forward or self.forward)(batch)
        loss, objective_report = term.objective(values, batch, term.denominator)
        return loss, objective_report | report

    def weight(self, batch: Batch) -> Tensor:
        """Return the weight of each element of forward()'s values and of reports in a mean.

        It is [T], the learned tokens.
        """
        return batch.loss_mask

    def denominator(self, batch: Batch, rows: Rows) -> Denominator:
        """Count the learned tokens and sequences of one optimizer step over all ranks.

        It is one collective.
        """
        share = batch.select([row for members in rows for row in members])
        learned = sequence_sums(share.loss_mask.float(), share)
        counts = torch.stack([learned.sum(), (learned > 0).sum(dtype=torch.float32)])
        tokens, sequences = self.strategy.begin_sum(counts)().to(self.strategy.device)
        return Denominator(tokens, sequences, mean_counts=self.mean_counts)

    # -- one optimizer step

    def learn(self, terms: Sequence[LossTerm], metrics: Metrics) -> tuple[Tensor, Tensor]:
        """Take one optimizer step on the sum of the terms.

        Returns the loss over all ranks, and the gradient norm before clipping. Reports are averaged
        over learned tokens; if the name ends in `_max` or `_min`, the extreme is taken.
        """
        self.begin(sum(len(term.rows) for term in terms))
        for term in terms:
            for batch in micro_batches(term.batch, term.rows, self.strategy.to_device):
                self.record(self.add_gradients(batch, term), batch, metrics)
        return self.finish()

    def begin(self, num_microbatches: int, *, learn: bool = True) -> None:
        """Begin an optimizer step of so many micro-batches, as many on every rank.

        Without `learn` the loss is only measured. Raises RuntimeError if a step is open already,
        and ValueError without an optimizer.
        """
        if self.left is not None:
            raise RuntimeError("an optimizer step is open: call finish() first")
        if learn and self.optimizer is None:
            raise ValueError(f"this {type(self).__name__} has no optimizer: create it with one")

        phase = "train" if learn else "logprob"
        self.strategy.enter(phase, self.module, self.optimizer if learn else None)
        self.module.train(learn)
        self.left = num_microbatches
        self.total = torch.zeros((), device=self.strategy.device)

    def add_gradients(self, batch: Batch, term: LossTerm) -> Report:
        """Add the gradients of a micro-batch on the device, and return the reports."""
        self.batch = batch
        loss, report = self.loss(batch, term)
        self.num_computed += batch.num_computed
        self.num_learned += len(batch.learned_tokens)

        optimizer, left = cast(Optimizer, self.optimizer), cast(int, self.left)
        self.strategy.backward(loss, self.module, optimizer, last=left == 1)
        self.left = left - 1
        self.total += loss.detach()
        return report

    def record(self, report: Report, batch: Batch, metrics: Metrics) -> None:
        weight = self.weight(batch)
        for name, entry in report.items():
            values, weights = entry if isinstance(entry, Weighted) else (entry, weight)
            # The suffix of a name says how several micro-batches and ranks are joined.
            add = {"_max": metrics.max, "_min": metrics.min}.get(name[-4:], metrics.mean)
            add(name, values, weights)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Step the optimizer; return the loss over all ranks, and the norm before clipping."""
        # The sum is on its way while the optimizer steps.
        wait = self.strategy.begin_sum(self.total)
        norm = self.strategy.optimizer_step(
            cast(Optimizer, self.optimizer), self.module, self.scheduler, name=self.NAME
        )
        self.left = self.batch = None
        return wait(), norm.to(self.total.device)

    # -- inference

    def infer(
        self, forward: Forward, batch: Batch, rows: Rows, module: nn.Module | None = None
    ) -> Tensor:
        """Compute one value per token, in the batch's order: [T] float32 on the host.

        `module` is what `forward` runs, if it is not the role's own.
        """
        module = self.module if module is None else module
        self.strategy.enter("logprob", module, None)
        module.eval()
        return infer(forward, batch, rows, self.strategy.to_device)


@dataclass(frozen=True, slots=True)
class Learner:
    """A role and the objective that it minimizes.

    The targets of one role do not depend on the updates of another.
    """

    name: str
    """Name of the model in checkpoints."""
    role: Role
    objective: Objective
    phase: str = "train"
    """Name of the phase, and prefix of the metrics."""
    first_step: int = 1
    """First step where the role learns."""
    count: Callable[[Denominator, Batch, Rows], Denominator] | None = None
    """Adds to the denominator what another mean divides by."""
    further_terms: Sequence[Callable[[], LossTerm]] = ()
    """Each returns the next further term of the loss, such as a supervised one."""

    def learn(self, plan: TrainingPlan, metrics: Metrics) -> list[Tensor]:
        """Take one optimizer step for each minibatch and epoch; return the losses."""
        role = self.role
        batch = plan.experience
        losses = []
        for number, rows in enumerate(plan.updates):
            denominator = replace(role.denominator(batch, rows), updates_before=number)
            if self.count is not None:
                denominator = self.count(denominator, batch, rows)
            if role.scheduler is not None:
                metrics.mean(f"{self.phase}/learning_rate", role.scheduler.get_last_lr()[0])

            terms = [LossTerm(batch, rows, self.objective, denominator)]
            loss, norm = role.learn([*terms, *(term() for term in self.further_terms)], metrics)
            metrics.mean(f"{self.phase}/loss", loss)
            metrics.mean(f"{self.phase}/grad_norm", norm)
            losses.append(loss)
        return losses
