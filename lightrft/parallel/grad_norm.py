"""Gradient norm over all parameters of an optimizer, whatever the sharding."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightrft.parallel.dtensor_slices import local_part

Axes = frozenset[str]
"""Names of the process groups that shard a tensor; empty if every rank has the whole tensor."""


def global_grad_norm(
    parameters: Iterable[nn.Parameter], device: torch.device, p: float = 2.0
) -> Tensor:
    """Return the p-norm of all gradients over all shards: [] float32 on `device`.

    It is equal on all ranks; p is 1, 2, ... or inf. The placements of the gradient itself count: it
    may be whole although the parameter is sharded, and a partial one is summed first. Local parts
    are summed over the axes that shard them, never over axes that replicate them. There is one
    collective per axis, whatever the number of meshes. Axes come in the order that the parameters
    meet them, because the groups of one axis have other names on other ranks. A parameter without a
    gradient counts as 0; plain gradients are assumed to be equal on all ranks. All ranks must call
    this with the same parameters.
    """
    parameters = list(parameters)
    gradients = [
        _sum_partial(parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    groups = dict(
        chain.from_iterable(_sharding_groups(tensor) for tensor in chain(parameters, gradients))
    )
    by_axes: dict[Axes, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_axes[frozenset(name for name, _ in _sharding_groups(gradient))].append(
            local_part(gradient)
        )

    # All subsets of the axes, in the same order on every rank.
    subsets: list[Axes] = [frozenset()]
    for name in groups:
        subsets += [subset | {name} for subset in subsets]
    totals = torch.stack([_sum_of_powers(by_axes.get(subset, []), p, device) for subset in subsets])
    # Only the sums that this axis shards are reduced over it.
    for name in groups:
        cut = [index for index, subset in enumerate(subsets) if name in subset]
        part = totals[cut]
        dist.all_reduce(
            part, op=dist.ReduceOp.MAX if p == torch.inf else dist.ReduceOp.SUM, group=groups[name]
        )
        totals[cut] = part

    return totals.amax() if p == torch.inf else totals.sum() ** (1 / p)


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by max_norm / norm if that is below 1.

    `norm` comes from global_grad_norm().
    """
    gradients = [
        local_part(parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    if gradients:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale.to(gradients[0].device))


def _sum_of_powers(gradients: list[Tensor], p: float, device: torch.device) -> Tensor:
    """Return the sum of |x|^p, or the maximum for p = inf: [].

    For inf, NaN becomes inf, because a maximum would lose it.
    """
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch.stack(
        [norm.to(device) for norm in torch._foreach_norm(gradients, p, torch.float32)]
    )
    return (
        norms.amax().nan_to_num(nan=torch.inf, posinf=torch.inf)
        if p == torch.inf
        else norms.pow(p).sum()
    )


def _sharding_groups(tensor: Tensor) -> list[tuple[str, dist.ProcessGroup]]:
    """Return names and groups that shard a tensor; groups of one rank do not count."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    dims = [
        dim
        for dim, place in enumerate(tensor.placements)
        if not place.is_replicate() and mesh.size(dim) > 1
    ]
    return [(mesh.get_group(dim).group_name, mesh.get_group(dim)) for dim in dims]


def _sum_partial(gradient: Tensor) -> Tensor:
    if not isinstance(gradient, DTensor) or not any(
        place.is_partial() for place in gradient.placements
    ):
        return gradient
    return gradient.redistribute(
        placements=[Replicate() if place.is_partial() else place for place in gradient.placements]
    )
