"""Find the slices of a DTensor that this rank holds, from its mesh and placements."""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """Sharding of a tensor along `dim` over the ranks of `group`.

    `shape` is the shape before this sharding.
    """

    dim: int
    shape: torch.Size
    group: dist.ProcessGroup

    @property
    def pieces(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rows(self) -> int:
        """Return the number of rows of a full piece; the last pieces may be shorter or empty."""
        return -(-self.shape[self.dim] // self.pieces)

    @property
    def counts(self) -> list[int]:
        """Return the number of rows of each rank."""
        ends = [min(rank * self.rows, self.shape[self.dim]) for rank in range(self.pieces + 1)]
        return [end - start for start, end in pairwise(ends)]

    @property
    def local(self) -> slice:
        """Return the range of this rank's rows."""
        last = self.shape[self.dim]
        first = min(dist.get_rank(self.group) * self.rows, last)
        return slice(first, min(first + self.rows, last))

    @property
    def rest(self) -> torch.Size:
        return self.shape[: self.dim] + self.shape[self.dim + 1 :]

    @property
    def numel(self) -> int:
        """Return the number of elements of a full piece."""
        return self.rows * self.rest.numel()


def shard_slices(tensor: Tensor) -> list[ShardSlice]:
    """Return all shardings of a tensor, the last applied one first.

    With FSDP and tensor parallelism FSDP's comes first, although the mesh dim is further left.
    """
    if not isinstance(tensor, DTensor):
        return []

    mesh = tensor.device_mesh
    shape = list(tensor.shape)
    slices = []
    # The shape shrinks with each sharding, because the next one divides what is left.
    for mesh_dim in _sharding_dims(tensor):
        shard = ShardSlice(
            tensor.placements[mesh_dim].dim, torch.Size(shape), mesh.get_group(mesh_dim)
        )
        shape[shard.dim] = shard.local.stop - shard.local.start
        slices.append(shard)

    return slices[::-1]


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of the full tensor that this rank holds.

    It is the whole tensor if that is plain or replicated.
    """
    slices = [slice(0, size) for size in tensor.shape]
    for shard in reversed(shard_slices(tensor)):
        begin = slices[shard.dim].start
        slices[shard.dim] = slice(begin + shard.local.start, begin + shard.local.stop)
    return tuple(slices)


def divided_dims(tensor: DTensor) -> list[int]:
    """Return the mesh dims of several ranks that do not all have the same values."""
    return [
        dim
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and tensor.device_mesh.size(dim) > 1
    ]


def _sharding_dims(tensor: DTensor) -> list[int]:
    """Return the mesh dims that shard the tensor, in the order that they were applied in.

    FSDP shards the result of tensor parallelism, and marks this with a strided placement if both
    shard the same dim; otherwise the order does not matter. Plain shards of one dim are applied
    from left to right. Raise ValueError for partial tensors and for more than two shardings.
    """
    dims = divided_dims(tensor)
    placements = [tensor.placements[dim] for dim in dims]
    if len(dims) > 2 or any(placement.is_partial() for placement in placements):
        raise ValueError(
            "only replicated parameters, and parameters sharded at most twice, are supported, not"
            f" {tensor.placements}"
        )

    # On one dim the order decides which rows a rank holds.
    on_one_dim = len({placement.dim for placement in placements}) < len(placements)
    plain_on_one_dim = on_one_dim and all(type(placement) is Shard for placement in placements)
    return dims if plain_on_one_dim else dims[::-1]
