"""How a parameter lies on the ranks: the cuts that made this rank's part of it."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True, slots=True)
class Cut:
    """One way in which a tensor is cut: along its dim, over the ranks of a group. `shape` is that before the cut."""

    dim: int
    shape: torch.Size
    group: dist.ProcessGroup

    @property
    def pieces(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rows(self) -> int:
        """Of a full piece; the last ones are shorter, or empty."""
        return -(-self.shape[self.dim] // self.pieces)

    @property
    def own(self) -> slice:
        """This rank's rows."""
        last = self.shape[self.dim]
        first = min(dist.get_rank(self.group) * self.rows, last)
        return slice(first, min(first + self.rows, last))

    @property
    def rest(self) -> torch.Size:
        return self.shape[: self.dim] + self.shape[self.dim + 1 :]

    @property
    def numel(self) -> int:
        """Elements of a full piece."""
        return self.rows * self.rest.numel()


def cuts_of(tensor: Tensor) -> list[Cut]:
    """The last one made comes first: of FSDP and tensor parallelism that is FSDP's, although its mesh dim stands to the left."""
    if not isinstance(tensor, DTensor):
        return []
    mesh, shape, cuts = tensor.device_mesh, list(tensor.shape), []
    for mesh_dim in _cutting(tensor):
        cut = Cut(tensor.placements[mesh_dim].dim, torch.Size(shape), mesh.get_group(mesh_dim))
        shape[cut.dim] = cut.own.stop - cut.own.start
        cuts.append(cut)
    return cuts[::-1]


def own_part(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the full tensor; all of it for a plain or replicated one."""
    part = [slice(0, size) for size in tensor.shape]
    for cut in reversed(cuts_of(tensor)):
        begin = part[cut.dim].start
        part[cut.dim] = slice(begin + cut.own.start, begin + cut.own.stop)
    return tuple(part)


def _cutting(tensor: DTensor) -> list[int]:
    """The mesh dims that cut it, in the order in which they did.

    FSDP cuts what tensor parallelism has left, and says so with a strided placement where both cut one dim; elsewhere the
    order is free. Plain shards of one dim were made from left to right.
    """
    mesh = tensor.device_mesh
    dims = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate() and mesh.size(dim) > 1]
    cuts = [tensor.placements[dim] for dim in dims]
    if len(dims) > 2 or any(cut.is_partial() for cut in cuts):
        raise ValueError(f"only replicated parameters and those sharded up to twice are known, not {tensor.placements}")
    plain_on_one_dim = len({cut.dim for cut in cuts}) < len(cuts) and all(type(cut) is Shard for cut in cuts)
    return dims if plain_on_one_dim else dims[::-1]
