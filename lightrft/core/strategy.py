"""What a step needs of a strategy: where rows go, where tensors live, and how a model learns."""

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.core.batch import Batch, Rows, consecutive
from lightrft.core.engine import Decoding, LocalEngine, RequestLoop

B = TypeVar("B", bound=Batch)


class DataRanks(Protocol):
    """Ranks with different samples. Every rank calls a method together with the others."""

    size: int
    rank: int

    def sum(self, value: Tensor) -> Tensor: ...

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's small object, in rank order."""

    def gather_rows(self, rows: Tensor) -> tuple[list[Tensor], Any]:
        """Return every rank's rows [n, w] int64, in rank order, and something else."""


class Strategy(Protocol):
    """Distributes a step. All ranks call every method together, in the same order.

    A rule holds for all of them: the loss given to backward() is this rank's share of the mean over
    all ranks, and gradients are summed, never averaged.
    """

    device: torch.device
    data: DataRanks

    # the engine

    def engine_awake(self, actor: nn.Module) -> AbstractContextManager[Any]:
        """Wake the engine with the newest weights of the actor; it sleeps afterwards."""

    def open_generation(self, sampling: Decoding) -> RequestLoop:
        """Return a loop for requests of this rank."""

    @property
    def weight_version(self) -> int: ...

    # rows

    def redistribute(
        self, batch: B, *, minibatch_size: int | None, units: Tensor | None = None, **limits: Any
    ) -> tuple[B, list[Rows]]:
        """Send each sequence to the rank that computes it.

        Return this rank's new share, and [k][m]: its rows in micro-batch m of optimizer step k. All
        ranks have equal numbers of both. A step has `minibatch_size` sequences of all ranks, or
        `units` if these are given: [N] int64, ascending over all ranks. `limits` of micro-batches
        are those of ExperienceMaker.
        """

    def to_device(self, batch: Batch) -> Batch:
        """Return a micro-batch on the device, in the form that models compute fastest."""

    # learning

    def enter(
        self, phase: Literal["train", "logprob"], module: nn.Module, optimizer: Optimizer | None
    ) -> None:
        """Make room on the device for what comes next."""

    def backward(
        self, loss: Tensor, module: nn.Module, optimizer: Optimizer, *, last: bool
    ) -> None: ...

    def optimizer_step(
        self, optimizer: Optimizer, module: nn.Module, scheduler: LRScheduler | None, *, name: str
    ) -> Tensor:
        """Clip the gradients and step; return the gradient norm before clipping: [].

        `name` is the name of the model in warnings.
        """

    def begin_sum(self, value: Tensor) -> Callable[[], Tensor]:
        """Start to sum over all data ranks; return a function that waits for the sum."""


class Alone:
    """The axis of a single rank."""

    size, rank = 1, 0

    def sum(self, value: Tensor) -> Tensor:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def gather_rows(self, rows: Tensor) -> tuple[list[Tensor], None]:
        return [rows], None


class OneProcess:
    """A strategy for one process: the model and the engine stay where they are.

    `max_tokens` limits a micro-batch.
    """

    def __init__(self, engine: LocalEngine, *, max_tokens: int = 8192, max_norm: float = 1.0):
        self.engine = engine
        self.max_tokens = max_tokens
        self.max_norm = max_norm
        self.device = torch.device("cpu")
        self.data: DataRanks = Alone()
        self.weight_version = 0

    @contextmanager
    def engine_awake(self, actor: nn.Module) -> Generator[None]:
        self.weight_version += 1
        weights: Iterable[tuple[str, Tensor]] = actor.state_dict().items()
        self.engine.load_weights(weights, self.weight_version)
        yield

    def open_generation(self, sampling: Decoding) -> RequestLoop:
        return self.engine.open(sampling)

    def redistribute(
        self, batch: B, *, minibatch_size: int | None, units: Tensor | None = None
    ) -> tuple[B, list[Rows]]:
        if units is not None:
            raise ValueError("OneProcess makes steps of sequences, and not of other units")
        batch = batch.select(batch.rows.argsort())
        return batch, consecutive(batch.lengths.tolist(), minibatch_size, self.max_tokens)

    def to_device(self, batch: Batch) -> Batch:
        return batch.to(self.device)

    def enter(self, phase: str, module: nn.Module, optimizer: Optimizer | None) -> None:
        self.device = next(module.parameters()).device

    def backward(
        self, loss: Tensor, module: nn.Module, optimizer: Optimizer, *, last: bool
    ) -> None:
        loss.backward()

    def optimizer_step(
        self, optimizer: Optimizer, module: nn.Module, scheduler: LRScheduler | None, *, name: str
    ) -> Tensor:
        norm = nn.utils.clip_grad_norm_(module.parameters(), self.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        return norm

    def begin_sum(self, value: Tensor) -> Callable[[], Tensor]:
        return lambda: value
