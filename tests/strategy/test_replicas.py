"""Gradients of ranks that each have the whole model: which are summed, and when."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightrft.strategy.backends.replicas import Replicas
from ranks import run_ranks
from strategy.training import strategy

LAYERS = 4


def layers(number: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(number))


def loss_of(used: list[nn.Module], rank: int, micro_batch: int) -> Tensor:
    value = torch.full((2, 3), 1.0 + rank + micro_batch)
    for layer in used:
        value = layer(value)
    return value.sum()


def used_by(model: nn.ModuleList, rank: int, micro_batch: int) -> list[nn.Module]:
    """The last layer is used by nobody, the one before it by one micro-batch of rank 1."""
    *always, sometimes, _ = model
    return [*always, *([sometimes] if (rank, micro_batch) == (1, 0) else [])]


def gradients() -> list[Tensor | None]:
    made = strategy(dp_replicate=0)
    model = layers(LAYERS)
    replicas = Replicas(model, made.mesh.replicate, bucket=1)
    for micro_batch, last in enumerate((False, True)):
        used = used_by(model, made.get_rank(), micro_batch)
        replicas.backward(loss_of(used, made.get_rank(), micro_batch), last=last)
    return [layer.weight.grad for layer in model]


def test_gradients_are_those_of_one_process():
    model = layers(LAYERS)
    for rank in range(2):
        for micro_batch in range(2):
            loss_of(used_by(model, rank, micro_batch), rank, micro_batch).backward()

    *expected, nothing = [layer.weight.grad for layer in model]
    assert nothing is None
    for *found, unused in run_ranks(2, gradients):
        assert unused is None
        for total, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(total, reference, rtol=1e-6, atol=0)


def events(bucket: int) -> list[str]:
    """Return the order of sums and of layers whose backward pass is done."""
    made = strategy(dp_replicate=0)
    model = layers(LAYERS)
    replicas = Replicas(model, made.mesh.replicate, bucket)
    seen = []
    for number, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(
            lambda _, number=number: seen.append(f"layer {number}")
        )
    start = dist.all_reduce
    with patch.object(
        dist,
        "all_reduce",
        lambda *args, **options: (seen.append("sum"), start(*args, **options))[1],
    ):
        for micro_batch, last in enumerate((False, True)):
            replicas.backward(loss_of(list(model), made.get_rank(), micro_batch), last=last)
    return seen[LAYERS:]


@pytest.mark.parametrize("size", [1, 2])
def test_layers_are_summed_while_others_are_still_computed(size):
    """A layer has 36 bytes. The first micro-batch sums nothing."""
    (seen, _) = run_ranks(2, events, 36 * size)
    expected = []
    for number in reversed(range(LAYERS)):
        done = number % size == 0
        expected += ["sum", f"layer {number}"] if done else [f"layer {number}"]
    assert seen == expected
