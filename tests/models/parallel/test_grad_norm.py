"""One norm over plain tensors and DTensors on several meshes: the whole model's in torch.

It does not matter where their gradients lie.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightrft.models.parallel.mesh import Mesh
from lightrft.strategy.backends.optim import clip_gradients, global_grad_norm
from ranks import run_ranks

CPU = torch.device("cpu")
SHAPES = [(7, 5), (6, 4), (9,), (3, 3), (5, 2), (4, 4), (8,)]


def whole_gradients(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def expected_norm(gradients: list[Tensor]) -> float:
    flat = torch.cat([gradient.double().flatten() for gradient in gradients])
    return torch.linalg.vector_norm(flat).item()


def mixed(mesh: Mesh, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return parameters of every kind.

    FSDP over tensor parallelism, each alone, plain, a gradient that is whole where its parameter is
    cut, a partial one.
    """
    weights = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    module = nn.Module()
    for index, placement in enumerate([Shard(0), Shard(1), Replicate()]):
        module.register_parameter(
            str(index), nn.Parameter(distribute_tensor(weights[index], mesh.tensor, [placement]))
        )

    module.register_parameter("3", nn.Parameter(weights[3]))
    fully_shard(module, mesh=mesh.parameters)
    cut = [
        nn.Parameter(distribute_tensor(weights[index], mesh.tensor, [Shard(0)])) for index in (4, 5)
    ]

    parameters = [*module.parameters(), *cut, nn.Parameter(weights[6])]
    gradients = whole_gradients(dtype)
    for parameter, gradient in zip(parameters[:4], gradients[:4], strict=True):
        repeated = distribute_tensor(
            gradient, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim
        )
        parameter.grad = repeated.redistribute(placements=parameter.placements)

    parameters[4].grad = distribute_tensor(gradients[4], mesh.tensor, [Replicate()])
    share = gradients[5] * (0.25 if mesh.tp.rank else 0.75)
    parameters[5].grad = DTensor.from_local(share, mesh.tensor, [Partial()], run_check=False)
    parameters[6].grad = gradients[6]

    return parameters


def norm_and_clipped(sizes: tuple[int, int], dtype: torch.dtype) -> tuple[float, int, list[Tensor]]:
    """Return the norm, its collectives, and gradients that are clipped to half of their norm."""
    parameters = mixed(Mesh("cpu", tp=sizes[1]), dtype)
    before = global_grad_norm(parameters, CPU).item()
    parameters[5].grad = parameters[5].grad.redistribute(placements=[Replicate()])
    original = dist.all_reduce
    count = []
    dist.all_reduce = lambda *args, **options: (count.append(1), original(*args, **options))
    norm = global_grad_norm(parameters, CPU)
    dist.all_reduce = original
    clip_gradients(parameters, norm, norm.item() / 2)
    clipped = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]

    return before, len(count), clipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)], ids=["tp", "fsdp", "fsdp x tp"])
def test_norm_and_clip_equal_torch_on_the_whole_model(sizes, dtype):
    gradients = whole_gradients(dtype)
    if sizes[1] > 1 and dtype == torch.bfloat16:
        gradients[5] = gradients[5] * 0.25 + gradients[5] * 0.75  # as its two halves round
    if sizes[1] == 1:
        gradients[5] = gradients[5] * 0.75  # the other half is nobody's

    expected = expected_norm(gradients)
    for norm, collectives, clipped in run_ranks(
        sizes[0] * sizes[1], norm_and_clipped, sizes, dtype
    ):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert collectives == sum(size > 1 for size in sizes), (
            "one for each axis, however many meshes"
        )
        for mine, gradient in zip(clipped, gradients, strict=True):
            torch.testing.assert_close(
                mine, gradient / 2, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0
            )


def is_finite(value: float) -> bool:
    """Compute the norm where one rank's shard is not finite."""
    parameters = mixed(Mesh("cpu", tp=2), torch.float32)
    if dist.get_rank() == 2:
        parameters[0].grad.to_local()[0] = value
    return math.isfinite(global_grad_norm(parameters, CPU))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_every_rank_sees_what_is_not_finite(value):
    assert run_ranks(4, is_finite, value) == [False] * 4


def without_gradients() -> tuple[float, float]:
    mesh = Mesh("cpu", tp=2).tensor
    cut = [nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)])) for _ in range(2)]
    nothing = global_grad_norm(cut, CPU).item()
    if dist.get_rank() == 0:  # a part of the model that this rank's data did not reach
        cut[0].grad = DTensor.from_local(
            torch.tensor([3.0, 4.0]), mesh, [Shard(0)], run_check=False
        )
    return nothing, global_grad_norm(cut, CPU).item()


def test_a_parameter_without_gradient_counts_as_zero():
    assert run_ranks(2, without_gradients) == [(0.0, 5.0)] * 2
