"""One gradient norm over everything that one optimizer trains, however it is sharded."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

Key = tuple | None
"""Mesh and sharded mesh dims of a parameter; None for a plain one."""


def global_grad_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """L2 norm of all gradients over all shards: [] float32 on `device`, equal on all ranks.

    Local squares are summed over the mesh dims that shard, never over those that replicate. All ranks call this with
    the same parameters; one without a gradient counts as 0. Plain parameters are taken to be equal on all ranks.
    """
    groups: dict[Key, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradients = groups[_key(parameter)]
        if parameter.grad is not None:
            gradients.append(_local(parameter.grad))
    total = torch.zeros((), device=device)
    for key, gradients in groups.items():
        squares = torch.zeros((), device=device)
        if gradients:
            squares = torch.stack([norm.to(device) for norm in torch._foreach_norm(gradients, 2, torch.float32)]).square().sum()
        total += squares if key is None else _summed(squares, *key)
    return total.sqrt()


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by max_norm / norm where that is below 1. `norm` is the one of global_grad_norm."""
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale.to(gradients[0].device))


def _key(tensor: Tensor) -> Key:
    if not isinstance(tensor, DTensor):
        return None
    return tensor.device_mesh, tuple(dim for dim, placement in enumerate(tensor.placements) if isinstance(placement, Shard))


def _summed(squares: Tensor, mesh: dist.DeviceMesh, dims: tuple[int, ...]) -> Tensor:
    for dim in dims:
        if mesh.size(dim) > 1:
            dist.all_reduce(squares, group=mesh.get_group(dim))
    return squares


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
