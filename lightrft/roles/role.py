"""Base of all roles: a model that is trained or used for inference in micro-batches.

The micro-batches are planned over all ranks.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.algorithms.objectives import local_gradients
from lightrft.batching.micro_batches import regroup
from lightrft.batching.planner import Batching
from lightrft.config.sections import TrainSection
from lightrft.core.batch import Batch, padded
from lightrft.core.batches import Rows, empty_microbatch, infer, micro_batches
from lightrft.core.metrics import Metrics
from lightrft.core.reduce import Denominator, LocalGradients, PromptTokens, Report, Weighted
from lightrft.roles.operations import TrainingOperations
from lightrft.roles.padded import SAMPLE_MASK, TOKEN_MASK, flatten_padded
from lightrft.roles.reports import MicroBatchReports
from lightrft.strategy.phases import Phase
from lightrft.strategy.strategy import StrategyBase

Objective = Callable[[Tensor, Any, Denominator], tuple[Tensor, Report]]
"""(the role's values, batch, denominator) -> this micro-batch's share of the loss [], and reports
by metric name.
"""
ALL_MB_METRICS = "all_mb_metrics"
"""NeMo-RL's name for the metrics of all micro-batches."""
MAX_TOKENS: int = TrainSection.max_tokens_per_microbatch


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A term of the loss of an optimizer step: sequences in micro-batches, and an objective.

    The objective computes each micro-batch's share of the term.
    """

    batch: Batch
    rows: Rows
    objective: Objective
    denominator: Denominator
    forward: Callable[[Batch, LocalGradients | None], tuple[Tensor, Report]]
    """Function that computes the input of the objective, and further reports; see Role.forward."""


@dataclass(slots=True)
class TrainStep:
    """An optimizer step that has begun."""

    objective: Objective
    denominator: Denominator
    num_microbatches: int
    learn: bool
    loss: Tensor
    """This rank's share so far, []. A mixture appends the load of its experts before the sum."""
    num_started: int = 0
    """Number of micro-batches that have been passed in."""
    num_done: int = 0
    """Number of micro-batches whose gradients have been added."""
    batch: Batch | None = None
    """The newest micro-batch."""
    expert_load: Tensor | None = None
    """How many of this rank's tokens chose each expert so far, [layers, E], if it is measured."""


class Role(ABC):
    """A model under a strategy. It learns if it has an optimizer.

    A run passes flat batches, planned over all ranks: to denominator(),
    update() and to the methods of a role that compute, such as Policy.logprobs().

    Loops of your own pass mappings with `input_ids` [B, S] and `input_lengths` [B], right-padded,
    to train(), redistribute() and all methods that begin with `get_`. A mapping contains this
    rank's rows: any number, including none. Results are in the caller's order, and have the same S
    on all ranks: the largest S of all, rounded up to a multiple of `width_multiple`.

    All ranks call a method together.
    """

    NAME: ClassVar[str] = "model"
    """Name in warnings."""
    TRAIN_KEYS: ClassVar[Sequence[str]] = (TOKEN_MASK, SAMPLE_MASK)
    """Keys that train() needs in addition to ids and lengths."""

    def __init__(
        self,
        strategy: StrategyBase,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        *,
        average: nn.Module | None = None,
        max_tokens: int = MAX_TOKENS,
        max_logprob_tokens: int | None = None,
        batching: Batching = "packed",
        width_multiple: int = 1,
    ):
        self.strategy = strategy
        self.module = module
        self.optimizer = optimizer
        self.scheduler = scheduler

        self.average = average
        """Moving average of the parameters; update_average() keeps it up to date. It is not
        frozen."""
        self.max_tokens = max_tokens
        """Maximum number of tokens of one micro-batch on one rank; a longer row is an error."""
        self.max_logprob_tokens = max_logprob_tokens
        """The same maximum where no gradients are computed; None: max_tokens."""
        self.batching = batching
        """Method of grouping rows into micro-batches; see planner.plan."""
        self.width_multiple = width_multiple
        """The width S of results is a multiple of this number."""
        self.num_computed = 0
        """Number of tokens that micro-batches of training have computed so far."""
        self.num_learned = 0
        """Number of tokens among them that the head predicted."""
        self._step: TrainStep | None = None

    @abstractmethod
    def forward(
        self, batch: Batch, gradients: LocalGradients | None = None
    ) -> tuple[Tensor, Report]:
        """Return the input of objectives, and further reports.

        `gradients` computes the gradients of the objective, if they are known before it is
        computed.
        """

    def weight(self, batch: Batch) -> Tensor:
        """Return the weight of each element of forward()'s values and of reports in a mean.

        It is [T], the learned tokens.
        """
        return batch.loss_mask

    @property
    def operations(self) -> float:
        """Return the floating-point operations of training so far.

        They are of all ranks that share this rank's rows.
        """
        return self._training_operations(self.num_computed, self.num_learned)

    @cached_property
    def _training_operations(self) -> TrainingOperations:
        return TrainingOperations.of(self.module.hf_model, self.strategy.full_shape)

    # -- planning rows over all ranks

    def limits(
        self, max_sequences: int | None = None, max_tokens: int | None = None
    ) -> dict[str, Any]:
        """Return the limits on micro-batches, as StrategyBase.redistribute() takes them."""
        return {
            "max_tokens": max_tokens or self.max_tokens,
            "max_sequences": max_sequences,
            "batching": self.batching,
        }

    def denominator(
        self, batch: Batch, rows: Rows, *, length: int | None = None, by_prompt: bool = False
    ) -> Denominator:
        """Count the learned tokens and sequences of one optimizer step over all ranks.

        It is one collective. `length` is the constant of seq-mean-token-sum-norm:
        --generate_max_len when None. `by_prompt`: count the tokens of each prompt too, for
        prompt-mean, in one more collective.
        """
        part = batch.select([row for members in rows for row in members])
        learned = torch.zeros(len(part)).index_add(0, part.sequence_ids, part.loss_mask.float())
        counts = self.strategy.all_reduce(
            torch.stack([part.num_loss_tokens, (learned > 0).sum(dtype=torch.float32)]), "sum"
        )
        tokens, sequences = counts.to(self.strategy.device)
        if length is None:
            length = self.strategy.config.generate_max_len
        if not by_prompt:
            return Denominator(tokens, sequences, length)

        of_prompts: Counter[int] = Counter()
        mine = list(zip(part.groups.tolist(), learned.tolist(), strict=True))
        for group, count in chain.from_iterable(self.strategy.mesh.data.gather(mine)):
            of_prompts[group] += count
        return Denominator(
            tokens, sequences, length, PromptTokens.of(of_prompts).to(self.strategy.device)
        )

    # -- one optimizer step on flat batches

    def update(
        self,
        batch: Batch,
        rows: Rows,
        objective: Objective,
        denominator: Denominator,
        metrics: Metrics,
        *,
        extra_term: LossTerm | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Take one optimizer step over the given micro-batches and `extra_term`.

        Returns the global loss and the gradient norm before clipping. Reports are averaged over
        learned tokens; if the name ends in `_max` or `_min`, the extreme is taken.
        """
        terms = [
            LossTerm(batch, rows, objective, denominator, self.forward),
            *([extra_term] if extra_term else []),
        ]
        return self.learn(terms, metrics)

    def measure(self, term: LossTerm, metrics: Metrics) -> Tensor:
        """Compute a term without learning; return the global value [].

        Reports `train/NAME` become `eval/NAME`.
        """
        measured = Metrics()
        value, _ = self.learn([term], measured, eval_mode=True)
        metrics.take(measured, lambda name: name.replace("train/", "eval/", 1))
        return value

    def learn(
        self, terms: Sequence[LossTerm], metrics: Metrics, *, eval_mode: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Take one optimizer step on the sum of the terms; see update().

        In eval_mode everything is computed and reported, and nothing is learned.
        """
        first = terms[0]
        count = sum(len(term.rows) for term in terms)
        self.begin_train_step(first.objective, first.denominator, count, eval_mode=eval_mode)

        for term in terms:
            for micro_batch in micro_batches(term.batch, term.rows, self.strategy.to_device):
                report = self.train_microbatch(micro_batch, term)
                for name, entry in report.items():
                    values, weight = (
                        entry if isinstance(entry, Weighted) else (entry, self.weight(micro_batch))
                    )
                    # The suffix of a name says how several micro-batches and ranks are joined.
                    add = {"_max": metrics.max, "_min": metrics.min}.get(name[-4:], metrics.mean)
                    add(name, values, weight)

        return self.finish_train_step()

    def begin_train_step(
        self,
        objective: Objective,
        denominator: Denominator,
        num_microbatches: int,
        *,
        eval_mode: bool = False,
    ) -> None:
        """Begin an optimizer step of `num_microbatches` micro-batches, as many on every rank."""
        if self._step is not None:
            raise RuntimeError(
                "a train step is open: call finish_train_step() or abort_train_step() first"
            )
        if not eval_mode and self.optimizer is None:
            raise ValueError(
                f"this {type(self).__name__} has no optimizer: create it with one, or pass"
                " eval_mode=True"
            )

        self.strategy.enter(
            Phase.LOGPROB if eval_mode else Phase.TRAIN,
            self.module,
            None if eval_mode else self.optimizer,
        )
        self.module.train(not eval_mode)
        loss = torch.zeros((), device=self.strategy.device)
        self._step = TrainStep(objective, denominator, num_microbatches, not eval_mode, loss)

    def train_microbatch(self, batch: Batch, term: LossTerm | None = None) -> Report:
        """Add the gradients of one micro-batch on the device; return the reports, on the device.

        It belongs to `term`; None: to the objective that the step was begun with.
        """
        step = self._open_step()
        term = term or LossTerm(batch, [], step.objective, step.denominator, self.forward)
        if step.num_started == step.num_microbatches:
            raise RuntimeError(
                f"the train step was begun with {step.num_microbatches} micro-batches, but got"
                " another one"
            )

        step.num_started = step.num_started + 1
        step.batch = batch

        # The head computes its gradients in the forward pass where those of the objective are known
        # early.
        gradients = local_gradients(term.objective, batch, term.denominator) if step.learn else None
        with torch.set_grad_enabled(step.learn):
            values, report = term.forward(batch, gradients)
            loss, more = term.objective(values, batch, term.denominator)

        if step.learn:
            self.strategy.backward(
                loss, self.module, self.optimizer, last=step.num_started == step.num_microbatches
            )
            self.num_computed += batch.num_computed
            self.num_learned += len(batch.learned_tokens)

        step.loss += loss.detach()
        step.num_done += 1
        return more | report

    def finish_train_step(self) -> tuple[Tensor, Tensor]:
        """Step the optimizer; return the global loss and the gradient norm before clipping.

        Both are [] on the device.
        """
        step = self._open_step()
        if step.num_done < step.num_microbatches:
            raise RuntimeError(
                f"finish_train_step() after {step.num_done} of {step.num_microbatches}"
                " micro-batches"
            )

        self._step = None
        norm = torch.zeros_like(step.loss)
        # The sum is on its way while the optimizer steps.
        loss = self.strategy.begin_sum(step.loss)
        if step.learn:
            norm = self.strategy.optimizer_step(
                self.optimizer, self.module, self.scheduler, name=self.NAME
            )

        return loss(), norm.to(step.loss.device)

    def abort_train_step(self) -> None:
        """Discard the open step.

        Parameters, optimizer and schedule are unchanged, and no gradient is left.
        """
        step = self._open_step()
        self._step = None
        if step.learn and step.num_started and step.num_done < step.num_microbatches:
            # Gradients that wait for the last micro-batch are inside the strategy: an empty one
            # flushes them.
            values, _ = self.forward(empty_microbatch(step.batch))
            self.strategy.backward(values.sum() * 0, self.module, self.optimizer)
        self.strategy.clear_gradients(self.module)

    def _open_step(self) -> TrainStep:
        if self._step is None:
            raise RuntimeError("no train step is open: call begin_train_step() first")
        return self._step

    def update_average(self, beta: float) -> None:
        """Update the average, if there is one.

        average <- beta * average + (1 - beta) * the trained parameters.
        """
        if self.average is not None:
            self.strategy.moving_average(self.module, self.average, beta)

    # -- inference

    def _infer(
        self, module: nn.Module, forward: Callable[[Batch], Tensor], batch: Batch, rows: Rows
    ) -> Tensor:
        """Compute one value per token, in the batch's order: [T] float32 on the host.

        `rows` has the micro-batches of training. Inference forms others if it has a limit of its
        own, max_logprob_tokens.
        """
        if self.max_logprob_tokens is not None:
            limits = {"max_tokens": self.max_logprob_tokens, "batching": self.batching}
            rows = regroup(self.strategy.mesh.data, batch, **limits)
        return self._infer_rows(module, forward, batch, rows)

    def _infer_rows(
        self, module: nn.Module, forward: Callable[[Batch], Tensor], batch: Batch, rows: Rows
    ) -> Tensor:
        self.strategy.enter(Phase.LOGPROB, module)
        module.eval()
        return infer(forward, batch, rows, self.strategy.to_device)

    # -- padded batches, for loops of your own

    def train(
        self,
        batch: Mapping[str, Any],
        loss_fn: Objective,
        gbs: int | None = None,
        mbs: int | None = None,
        eval_mode: bool = False,
    ) -> dict[str, Any]:
        """Take an optimizer step for every `gbs` rows of all ranks, counted in rank order.

        None: one step for all rows. The batch also has `token_mask` [B, S] and `sample_mask` [B],
        the tokens and rows that are learned, and any [B, S] or [B] column that `loss_fn` reads.
        `mbs` bounds the rows of one micro-batch. Returns `loss` [k] and `grad_norm` [k] (before
        clipping), global, of the k steps, and `metrics`: for each name a list with an entry for
        each micro-batch of all ranks. An entry is the mean over learned tokens, and `tokens` has
        the number. `all_mb_metrics` is another name for the same. In eval_mode nothing is
        learned, no gradient is computed, and grad_norm is 0.
        """
        flat, steps = self.redistribute(batch, gbs=gbs, mbs=mbs)
        if not steps:
            raise ValueError("the batch to train on is empty: it has no rows on any rank")

        numbers = []
        reports = MicroBatchReports()
        for rows in steps:
            self.begin_train_step(
                loss_fn, self.denominator(flat, rows), len(rows), eval_mode=eval_mode
            )
            for micro_batch in micro_batches(flat, rows, self.strategy.to_device):
                reports.add(self.train_microbatch(micro_batch), self.weight(micro_batch))
            numbers.append(torch.stack(self.finish_train_step()))

        # One transfer for all steps, so the host waits for the device only here.
        losses, norms = torch.stack(numbers).cpu().unbind(1)
        metrics = reports.gather(self.strategy.mesh.data)
        return {"loss": losses, "grad_norm": norms, "metrics": metrics, ALL_MB_METRICS: metrics}

    def redistribute(
        self, batch: Mapping[str, Any], *, gbs: int | None = None, mbs: int | None = None
    ) -> tuple[Batch, list[Rows]]:
        """Plan the rows of all ranks; return this rank's rows as a flat batch.

        The second result has the micro-batches of each optimizer step.
        """
        flattened = flatten_padded(
            batch, self.strategy.mesh.data, required=self.TRAIN_KEYS, columns=True
        )
        return self.strategy.redistribute(flattened.batch, minibatch_size=gbs, **self.limits(mbs))

    def _answer(
        self,
        batch: Mapping[str, Any],
        module: nn.Module,
        forward: Callable[[Batch], Tensor],
        mbs: int | None,
    ) -> Tensor:
        """Compute `forward` for each token of the caller's rows: [B, S, ...] float32 on the host.

        The padding is 0.
        """
        flattened = flatten_padded(batch, self.strategy.mesh.data)
        values = self._answer_flat(flattened.batch, flattened.owners, module, forward, mbs)
        width = -(-flattened.width // self.width_multiple) * self.width_multiple  # rounded up
        return padded(values, flattened.batch.lengths, width)

    def _answer_flat(
        self,
        batch: Batch,
        owners: list[list[int]],
        module: nn.Module,
        forward: Callable[[Batch], Tensor],
        mbs: int | None,
    ) -> Tensor:
        """Compute `forward` for each token of a flat batch: [T, ...] on the host.

        `owners` has the rows of each rank.
        """

        def compute(part: Batch, steps: list[Rows]) -> dict[str, Tensor]:
            return {"values": self._infer_rows(module, forward, part, steps[0] if steps else [])}

        limits = self.limits(mbs, self.max_logprob_tokens)
        return self.strategy.compute_tokens(batch, owners, compute, **limits)["values"]
