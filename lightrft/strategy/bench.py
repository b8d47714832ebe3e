"""Train a tiny model on fixed batches, under a strategy and in plain torch, for testing.py."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from lightrft.data.loader import share_of
from lightrft.strategy import StrategyBase

PROBE_VOCABULARY = 96
PROBE_STEPS = 3
PROBE_LENGTHS = [3, 9, 4, 12, 2, 6, 7, 5, 11, 3, 8, 4]
"""Vocabulary size, optimizer steps, and lengths of a step's sequences. With these lengths ranks
have different numbers of tokens."""
OptimizerOf = Callable[[nn.Module], Optimizer]


@dataclass
class TrainingRun:
    """Losses and gradient norms of some optimizer steps, and the parameters after them.

    The parameters have Hugging Face names.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Bench:
    strategy: StrategyBase
    folder: Path
    """Empty folder that all ranks share."""
    tolerance: float

    def prepared(
        self, optimizer_of: OptimizerOf, seed: int = 0, **options: Any
    ) -> tuple[PreTrainedModel, Optimizer]:
        model = tiny_model(seed, **options)
        return self.strategy.prepare((model, optimizer_of(model)))

    def backward(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        step: int,
        micro_batches: int = 1,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> float:
        """Run backward on this rank's share of an optimizer step; return its loss.

        `change` is applied to the loss first.
        """
        data = self.strategy.mesh.data
        total = 0.0
        denominator = tokens(step)
        rows = [batch(step)[row] for row in share_of(data.rank, data.size, len(PROBE_LENGTHS))]
        for index in range(micro_batches):
            loss = loss_of(model, rows[index::micro_batches], denominator)
            loss = loss if change is None else change(loss)
            self.strategy.backward(loss, model, optimizer, last=index == micro_batches - 1)
            total += loss.item()
        return total

    def course(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        steps: range = range(PROBE_STEPS),
        scheduler: Any = None,
        micro_batches: int = 1,
    ) -> TrainingRun:
        course = TrainingRun()
        # Losses are shares of the global mean, so the sum over ranks is the loss of the step.
        for step in steps:
            loss = self.backward(model, optimizer, step, micro_batches)
            course.norms.append(self.strategy.optimizer_step(optimizer, model, scheduler).item())
            course.losses.append(self.strategy.all_reduce(loss, "sum"))
        course.parameters = self.snapshot(model)
        return course

    def snapshot(self, model: nn.Module) -> dict[str, Tensor]:
        return {
            name: tensor.cpu().clone()
            for name, tensor in self.strategy.full_params(model, torch.float32)
        }

    def assert_near(self, run: TrainingRun, expected: TrainingRun) -> None:
        for actual, other in ((run.losses, expected.losses), (run.norms, expected.norms)):
            torch.testing.assert_close(
                torch.tensor(actual),
                torch.tensor(other),
                rtol=self.tolerance,
                atol=self.tolerance / 10,
            )
        assert distance(run.parameters, expected.parameters) < self.tolerance

    @contextmanager
    def max_norm(self, value: float) -> Iterator[None]:
        before = self.strategy.max_norm
        self.strategy.max_norm = value
        try:
            yield
        finally:
            self.strategy.max_norm = before


def tiny_model(seed: int = 0, tie: bool = False) -> PreTrainedModel:
    config = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        vocab_size=PROBE_VOCABULARY,
        initializer_range=0.08,
        tie_word_embeddings=tie,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )

    with torch.random.fork_rng(devices=[]):
        # All ranks and the plain loop need the same model, whatever was drawn before.
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).train()


def batch(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randint(3, PROBE_VOCABULARY, (length,), generator=generator)
        for length in PROBE_LENGTHS
    ]


def tokens(step: int) -> int:
    return sum(len(row) - 1 for row in batch(step))


def loss_of(model: nn.Module, rows: list[Tensor], denominator: int) -> Tensor:
    """Return the share of these rows in the mean loss over all tokens of an optimizer step."""
    device = next(model.parameters()).device
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100).to(device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return (
        F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        / denominator
    )


def sgd(model: nn.Module) -> Optimizer:
    """Build SGD: unlike Adam it reveals a constant factor on the gradients."""
    return SGD(model.parameters(), lr=0.3)


def plain(
    optimizer_of: OptimizerOf,
    steps: range = range(PROBE_STEPS),
    *,
    model: nn.Module | None = None,
    max_norm: float = 1.0,
    rates: list[float] | None = None,
) -> TrainingRun:
    """Run the same steps in plain torch: one process, one batch.

    `rates` are the learning rates of the steps.
    """
    model = model or tiny_model()
    optimizer = optimizer_of(model)
    course = TrainingRun()
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = rates[step] if rates else group["lr"]
        loss = loss_of(model, batch(step), tokens(step))
        loss.backward()
        course.norms.append(
            nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf).item()
        )
        course.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    course.parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return course


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative distance between two tensors of the same name."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    return max(
        ((actual[name] - expected[name]).norm() / (expected[name].norm() + 1e-8)).item()
        for name in expected
    )


def refused(action: Callable[[], Any], kind: type[Exception]) -> str:
    """Return the message of the error that `action` must raise; AssertionError without one."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError("this should have been an error")
