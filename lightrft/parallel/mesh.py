"""The only owner of ranks and groups: which axes the processes form and who is where on each."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from lightrft.parallel.collectives import Axis

AXES = ("dp_replicate", "dp_shard", "sp", "tp")


_meshes: dict[tuple[Any, ...], "Mesh"] = {}
"""Meshes of the default process group; see Mesh.shared()."""


class Mesh:
    """All processes as dp_replicate x dp_shard x sp x tp, tp fastest.

    `data` joins dp_replicate and dp_shard: its size is the number of replicas of data, which is what samplers,
    accumulation, denominators and metrics count. `model_parallel` joins sp and tp: the ranks of one replica of data, which hold
    the same prompts and samples; its rank 0 acts for them where only one may. `world` joins everything.
    """

    def __init__(
        self, device_type: str, *, dp_replicate: int = 1, sp: int = 1, tp: int = 1, timeout: timedelta | None = None
    ):
        """`timeout` is the longest wait of a collective; subgroups do not take over that of the world."""
        world_size = dist.get_world_size()
        problems = mesh_problems(world_size, dp_replicate=dp_replicate, sp=sp, tp=tp)
        if problems:
            raise ValueError("; ".join(problems))
        sizes = (dp_replicate, world_size // (dp_replicate * sp * tp), sp, tp)
        self.device_type = device_type
        self.device_mesh: DeviceMesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
        self.world = _axis("world", dist.group.WORLD)
        self.data = self._axis("data", ("dp_replicate", "dp_shard"))
        self.shard = self._axis("shard", ("dp_shard", "sp"))
        self.replicate = self._axis("dp_replicate", ("dp_replicate",))
        self.sp = self._axis("sp", ("sp",))
        self.tp = self._axis("tp", ("tp",))
        self.model_parallel = self._axis("model_parallel", ("sp", "tp"))
        self._engine_axes: dict[int, Axis] = {}
        self._replica_axes: dict[int, Axis] = {}
        self._aside: Axis | None = None
        self._timeout = timeout
        for axis in (self.world, self.data, self.shard, self.replicate, self.sp, self.tp, self.model_parallel):
            if timeout is not None and axis.group is not None:
                _set_pg_timeout(timeout, axis.group)

    @classmethod
    def shared(cls, device_type: str, **sizes: Any) -> "Mesh":
        """Return the mesh of these sizes in the default process group, made when it is first asked for.

        Groups cost threads, and torch remembers by a mesh's shape what it has worked out for its groups: so one strategy after
        another uses the same ones, which end with the process group. All ranks ask together.
        """
        world = dist.group.WORLD
        for key in [key for key in _meshes if key[0] is not world]:
            del _meshes[key]
        key = (world, device_type, *sorted(sizes.items()))
        if key not in _meshes:
            _meshes[key] = cls(device_type, **sizes)
        return _meshes[key]

    @property
    def parameters(self) -> DeviceMesh:
        """The mesh over which FSDP shards: [shard], or [replicate, shard] for hybrid sharding."""
        shard = self.device_mesh["dp_shard", "sp"]._flatten("dp_shard_sp")
        return shard if self.replicate.size == 1 else self.device_mesh["dp_replicate", "dp_shard_sp"]

    @property
    def tensor(self) -> DeviceMesh:
        """The one-dimensional mesh over which tensor parallelism splits layers."""
        return self.device_mesh["tp"]

    def engine(self, size: int) -> Axis:
        """The engine's tensor-parallel axis: `size` consecutive ranks of the world, whatever the training layout."""
        if self.world.size % size:
            raise ValueError(f"--engine_tp_size {size} does not divide the {self.world.size} processes")
        if size not in self._engine_axes:
            first = self.world.rank // size * size
            starts = range(0, self.world.size, size)
            groups = [dist.new_group(list(range(start, start + size)), timeout=self._timeout, group_desc="engine")
                      for start in starts]
            self._engine_axes[size] = _axis("engine", groups[first // size])
        return self._engine_axes[size]

    def engine_replicas(self, size: int) -> Axis:
        """Return the axis of the ranks at the same place in each engine of `size` ranks; all ranks ask together at first."""
        if size not in self._replica_axes:
            groups = [dist.new_group(list(range(place, self.world.size, size)), timeout=self._timeout, group_desc="replicas")
                      for place in range(size)]  # fmt: skip
            self._replica_axes[size] = _axis("replicas", groups[self.world.rank % size])
        return self._replica_axes[size]

    def aside(self) -> Axis:
        """All processes once more, over a group of its own on the hosts: for a thread whose collectives run beside the others."""
        if self._aside is None:
            self._aside = _axis("aside", dist.new_group(backend="gloo", timeout=self._timeout))
        return self._aside

    def _axis(self, name: str, dims: tuple[str, ...]) -> Axis:
        mesh = self.device_mesh[dims] if len(dims) == 1 else self.device_mesh[dims]._flatten("_".join(dims))
        return _axis(name, mesh.get_group())


def collectives_begun() -> dict[str, int]:
    """Group and kind of device -> collectives that this process has begun there; of all groups, those of libraries too.

    A group has the same name on all its ranks, and they begin the same collectives: a lower count is a rank that is late.
    """
    groups = [group for group in list(_world.pg_map) if group.size() > 1]
    counts = {
        f"{group.group_desc} #{group.group_name} ({device.type})": _begun(group, device)
        for group in groups for device in group._device_types
    }
    return {name: count for name, count in counts.items() if count is not None}


def _begun(group: dist.ProcessGroup, device: torch.device) -> int | None:
    """None where the backend does not count."""
    try:
        return group._get_backend(device)._get_sequence_number_for_group()
    except RuntimeError:
        return None


def mesh_problems(world_size: int, *, dp_replicate: int, sp: int, tp: int) -> list[str]:
    """Why these sizes cannot form a mesh, all reasons at once; empty when they can."""
    problems = [f"{name} must be at least 1, not {size}" for name, size in
                (("dp_replicate", dp_replicate), ("sp_size", sp), ("tp_size", tp)) if size < 1]
    if problems:
        return problems
    product = dp_replicate * sp * tp
    if world_size % product:
        problems.append(
            f"{world_size} processes cannot be split into dp_replicate {dp_replicate} x sp_size {sp} x tp_size {tp} = {product}"
        )
    return problems


def world_axis() -> Axis:
    """Return all processes as an axis, also before a process group exists: then this one alone."""
    return _axis("world", dist.group.WORLD) if dist.is_initialized() else Axis("world", 1, 0, None)


def _axis(name: str, group: dist.ProcessGroup) -> Axis:
    size = dist.get_world_size(group)
    return Axis(name, size, dist.get_rank(group), group if size > 1 else None)
