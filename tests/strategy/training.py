"""The same three optimizer steps in plain torch and under a strategy, over rows of different
length.
"""

import resource
import signal
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lightrft.strategy import FSDPStrategy
from ranks import whole

NUM_ROWS = 12
NUM_STEPS = 3
SHARES = {1: [12], 2: [8, 4], 4: [4, 4, 3, 1]}
"""Rows of each rank, by number of ranks."""


@dataclass
class TrainingRun:
    """What three steps did. Tensors by Hugging Face name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, before clipping."""
    parameters: dict[str, Tensor] = field(default_factory=dict)


def strategy(*, max_norm: float = 1.0, **args: Any) -> FSDPStrategy:
    made = FSDPStrategy(seed=1, max_norm=max_norm, args={"fsdp": True, **args})
    made.setup_distributed()
    return made


def load(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder)


def rows(step: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(5, 14, (NUM_ROWS,), generator=generator).tolist()
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def tokens_learned(batch: list[Tensor]) -> int:
    return sum(len(row) - 1 for row in batch)


def share_of_loss(model: nn.Module, batch: list[Tensor], denominator: int) -> Tensor:
    """Sum over the tokens of these rows, divided by all tokens of the optimizer step."""
    ids = nn.utils.rnn.pad_sequence(batch, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
    logits = model(input_ids=ids, use_cache=False).logits
    return (
        F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
        )
        / denominator
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Unlike Adam it shows a constant factor on the gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), foreach=False)


def plain_course(folder: str, optimizer_of: Any, *, max_norm: float = 1.0) -> TrainingRun:
    """One process, one batch, nothing of ours."""
    model = load(folder)
    course = TrainingRun()
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        batch = rows(step)
        loss = share_of_loss(model, batch, tokens_learned(batch))
        loss.backward()
        if step == 0:
            course.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        course.norms.append(
            nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf")).item()
        )
        optimizer.step()
        optimizer.zero_grad()
        course.losses.append(loss.item())

    course.parameters = {name: p.detach() for name, p in model.named_parameters()}
    return course


def my_rows(made: FSDPStrategy, step: int) -> list[Tensor]:
    shares = SHARES[made.mesh.data.size]
    rank = made.mesh.data.rank
    return rows(step)[sum(shares[:rank]) : sum(shares[: rank + 1])]


def one_step(
    made: FSDPStrategy,
    model: nn.Module,
    optimizer: Any,
    step: int,
    num_micro: int = 1,
    scheduler: Any = None,
) -> Any:
    """(loss of all ranks, norm, gradients summed over the ranks)."""
    mine = my_rows(made, step)
    denominator = tokens_learned(rows(step))
    total = 0.0

    for index in range(num_micro):
        micro_batch = mine[index * len(mine) // num_micro : (index + 1) * len(mine) // num_micro]
        loss = share_of_loss(model, micro_batch, denominator)
        made.backward(loss, model, optimizer, last=index == num_micro - 1)
        total += loss.item()

    gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    norm = made.optimizer_step(optimizer, model, scheduler)
    return made.all_reduce(total, "sum"), norm.item(), gradients


def strategy_course(
    folder: str,
    optimizer_of: Any,
    num_micro: int = 1,
    max_norm: float = 1.0,
    early: bool = True,
    args: dict | None = None,
) -> TrainingRun:
    """On every rank. `early`: the optimizer is made before prepare()."""
    made = strategy(max_norm=max_norm, **(args or {}))
    model = load(folder).train()
    course = TrainingRun()

    if early:
        model, optimizer = made.prepare((model, optimizer_of(model)))
    else:
        model = made.prepare(model)
        optimizer = optimizer_of(model)

    for step in range(NUM_STEPS):
        loss, norm, gradients = one_step(made, model, optimizer, step, num_micro)
        course.gradients = course.gradients or gradients
        course.losses.append(loss)
        course.norms.append(norm)

    course.parameters = snapshot(made, model)
    return course


def snapshot(made: FSDPStrategy, model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in made.full_params(model, torch.float32)}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative distance of a tensor, as a norm."""
    assert found.keys() == expected.keys()
    return max(
        ((found[name] - expected[name]).norm() / (expected[name].norm() + 1e-8)).item()
        for name in expected
    )


def assert_equal_courses(
    found: TrainingRun, expected: TrainingRun, *, relative: float = 1e-5
) -> None:
    torch.testing.assert_close(
        torch.tensor(found.losses), torch.tensor(expected.losses), rtol=relative, atol=0
    )
    torch.testing.assert_close(
        torch.tensor(found.norms), torch.tensor(expected.norms), rtol=relative, atol=0
    )
    assert distance(found.gradients, expected.gradients) < relative
    assert distance(found.parameters, expected.parameters) < relative


def fill_the_disk(limit: int) -> None:
    """Writes beyond so many bytes of one file fail with an OSError, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
