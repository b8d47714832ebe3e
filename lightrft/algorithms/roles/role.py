"""Base of the roles of a run: what options and loops of your own add to a role of the core."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.algorithms.means import MeanCounts, PromptTokens
from lightrft.algorithms.roles.operations import TrainingOperations
from lightrft.algorithms.roles.padded import SAMPLE_MASK, TOKEN_MASK, flatten_padded
from lightrft.algorithms.roles.reports import MicroBatchReports
from lightrft.config.sections import TrainSection
from lightrft.core.batch import Batch, Rows, empty_microbatch, micro_batches, padded
from lightrft.core.losses import Denominator, Report, sequence_sums
from lightrft.core.metrics import Metrics
from lightrft.core.role import Forward, LossTerm, Objective, Role
from lightrft.strategy.batching.micro_batches import regroup
from lightrft.strategy.batching.planner import Batching
from lightrft.strategy.strategy import StrategyBase

ALL_MB_METRICS = "all_mb_metrics"
"""NeMo-RL's name for the metrics of all micro-batches."""
OPEN = "a train step is open: call finish_train_step() or abort_train_step() first"
NO_STEP = "no train step is open: call begin_train_step() first"
MAX_TOKENS: int = TrainSection.max_tokens_per_microbatch


@dataclass(slots=True)
class TrainStep:
    """An optimizer step by hand that has begun."""

    num_microbatches: int
    learn: bool
    term: LossTerm
    """Objective and denominator."""


class DistributedRole(Role):
    """A model whose rows are planned over all ranks. It learns if it has an optimizer.

    A run passes flat batches, planned over all ranks: to denominator(), learn() and to the methods
    of a role that compute, such as Policy.logprobs().

    Loops of your own pass mappings with `input_ids` [B, S] and `input_lengths` [B], right-padded,
    to train(), redistribute() and all methods that begin with `get_`. A mapping contains this
    rank's rows: any number, including none. Results are in the caller's order, and have the same S
    on all ranks: the largest S of all, rounded up to a multiple of `width_multiple`.

    All ranks call a method together.
    """

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
        super().__init__(strategy, module, optimizer, scheduler)

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
        self._step: TrainStep | None = None

    @property
    def operations(self) -> float:
        """Return the floating-point operations of training so far.

        They are of all ranks that share this rank's rows.
        """
        return self._training_operations(self.num_computed, self.num_learned)

    @cached_property
    def _training_operations(self) -> TrainingOperations:
        return TrainingOperations.of(self.module.hf_model, self.strategy.full_shape)

    @cached_property
    def mean_counts(self) -> MeanCounts:
        """Return what denominators hold besides: the constant of seq-mean-token-sum-norm."""
        return MeanCounts(self.strategy.config.rollout.generate_max_len)

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

    def with_prompts(self, counted: Denominator, batch: Batch, rows: Rows) -> Denominator:
        """Count the tokens of each prompt too, for prompt-mean, in one more collective."""
        share = batch.select([row for members in rows for row in members])
        learned = sequence_sums(share.loss_mask.float(), share)
        of_prompts: Counter[int] = Counter()
        mine = list(zip(share.groups.tolist(), learned.tolist(), strict=True))
        for group, count in chain.from_iterable(self.strategy.data.gather(mine)):
            of_prompts[group] += count
        prompts = PromptTokens.of(of_prompts).to(self.strategy.device)
        return replace(counted, mean_counts=counted.mean_counts._replace(prompts=prompts))

    # -- one optimizer step on flat batches

    def measure(self, term: LossTerm, metrics: Metrics) -> Tensor:
        """Compute a term without learning; return the global value [].

        Reports `train/NAME` become `eval/NAME`.
        """
        count = len(term.rows)
        self.begin_train_step(term.objective, term.denominator, count, eval_mode=True)
        for batch in micro_batches(term.batch, term.rows, self.strategy.to_device):
            report = self.train_microbatch(batch, term)
            measured = {name.replace("train/", "eval/", 1): each for name, each in report.items()}
            self.record(measured, batch, metrics)
        return self.finish_train_step()[0]

    # -- one optimizer step by hand

    def begin_train_step(
        self,
        objective: Objective,
        denominator: Denominator,
        num_microbatches: int,
        *,
        eval_mode: bool = False,
    ) -> None:
        """Begin an optimizer step of `num_microbatches` micro-batches, as many on every rank."""
        self.refuse_open_step()
        if self.optimizer is None and not eval_mode:
            raise ValueError(
                f"this {type(self).__name__} has no optimizer: create it with one, or pass"
                " eval_mode=True"
            )
        self.begin(num_microbatches, learn=not eval_mode)
        term = LossTerm(None, [], objective, denominator)
        self._step = TrainStep(num_microbatches, not eval_mode, term)

    def train_microbatch(self, batch: Batch, term: LossTerm | None = None) -> Report:
        """Add the gradients of one micro-batch on the device; return the reports, on the device.

        It belongs to `term`; None: to the objective that the step was begun with.
        """
        step = self._open_step()
        if not self.left:
            raise RuntimeError(
                f"the train step was begun with {step.num_microbatches} micro-batches, but got"
                " another one"
            )
        term = term or step.term
        if step.learn:
            return self.add_gradients(batch, term)

        with torch.no_grad():
            loss, report = super().loss(batch, term)
        self.left -= 1
        self.total += loss
        return report

    def finish_train_step(self) -> tuple[Tensor, Tensor]:
        """Step the optimizer; return the global loss and the gradient norm before clipping.

        Both are [] on the device.
        """
        step = self._open_step()
        if self.left:
            raise RuntimeError(
                f"finish_train_step() after {step.num_microbatches - self.left} of"
                f" {step.num_microbatches} micro-batches"
            )
        self._step = None
        if step.learn:
            return self.finish()

        self.left = None
        return self.strategy.begin_sum(self.total)(), torch.zeros_like(self.total)

    def abort_train_step(self) -> None:
        """Discard the open step.

        Parameters, optimizer and schedule are unchanged, and no gradient is left.
        """
        if self.left is None:
            raise RuntimeError(NO_STEP)
        if self.batch is not None and self.left:
            # Gradients that wait for the last micro-batch are inside the strategy: an empty one
            # flushes them.
            values, _ = self.forward(empty_microbatch(self.batch))
            self.strategy.backward(values.sum() * 0, self.module, self.optimizer)
        self.left = self.batch = self._step = None
        self.strategy.clear_gradients(self.module)

    def refuse_open_step(self) -> None:
        """Raise RuntimeError if an optimizer step by hand has begun and not ended."""
        if self.left is not None:
            raise RuntimeError(OPEN)

    def _open_step(self) -> TrainStep:
        if self._step is None:
            raise RuntimeError(NO_STEP)
        return self._step

    def update_average(self, beta: float) -> None:
        """Update the average, if there is one.

        average <- beta * average + (1 - beta) * the trained parameters.
        """
        if self.average is not None:
            self.strategy.moving_average(self.module, self.average, beta)

    # -- inference

    def infer(
        self, forward: Forward, batch: Batch, rows: Rows, module: nn.Module | None = None
    ) -> Tensor:
        """Compute one value per token, in the batch's order: [T] float32 on the host.

        `rows` has the micro-batches of training. Inference forms others if it has a limit of its
        own, max_logprob_tokens.
        """
        if self.max_logprob_tokens is not None:
            limits = {"max_tokens": self.max_logprob_tokens, "batching": self.batching}
            rows = regroup(self.strategy.data, batch, **limits)
        return super().infer(forward, batch, rows, module)

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
        metrics = reports.gather(self.strategy.data)
        return {"loss": losses, "grad_norm": norms, "metrics": metrics, ALL_MB_METRICS: metrics}

    def redistribute(
        self, batch: Mapping[str, Any], *, gbs: int | None = None, mbs: int | None = None
    ) -> tuple[Batch, list[Rows]]:
        """Plan the rows of all ranks; return this rank's rows as a flat batch.

        The second result has the micro-batches of each optimizer step.
        """
        flattened = flatten_padded(
            batch, self.strategy.data, required=self.TRAIN_KEYS, columns=True
        )
        return self.strategy.redistribute(flattened.batch, minibatch_size=gbs, **self.limits(mbs))

    def _answer(
        self,
        batch: Mapping[str, Any],
        forward: Forward,
        mbs: int | None,
        module: nn.Module | None = None,
    ) -> Tensor:
        """Compute `forward` for each token of the caller's rows: [B, S, ...] float32 on the host.

        The padding is 0.
        """
        flattened = flatten_padded(batch, self.strategy.data)
        values = self._answer_flat(flattened.batch, flattened.owners, forward, mbs, module)
        width = -(-flattened.width // self.width_multiple) * self.width_multiple  # rounded up
        return padded(values, flattened.batch.lengths, width)

    def _answer_flat(
        self,
        batch: Batch,
        owners: list[list[int]],
        forward: Forward,
        mbs: int | None,
        module: nn.Module | None = None,
    ) -> Tensor:
        """Compute `forward` for each token of a flat batch: [T, ...] on the host.

        `owners` has the rows of each rank.
        """

        def compute(share: Batch, steps: list[Rows]) -> dict[str, Tensor]:
            rows = steps[0] if steps else []
            return {"values": Role.infer(self, forward, share, rows, module)}

        limits = self.limits(mbs, self.max_logprob_tokens)
        return self.strategy.compute_tokens(batch, owners, compute, **limits)["values"]
