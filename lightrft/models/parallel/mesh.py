"""The mesh of all processes: axes, process groups, and this rank's index on each."""

import os
from contextlib import suppress
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from lightrft.models.parallel.collectives import Axis

AXES = ("dp_replicate", "dp_shard", "sp", "tp")
DEVICE_AXES = ("dp_replicate", "dp_shard_sp", "tp")
"""Axes of parameters, as torch's libraries need them."""
EXPERT_AXES = ("dp_replicate", "dp_shard_sp", "ep")
"""The same for experts: `ep` is a part of dp_shard x sp."""


_meshes: dict[tuple[Any, ...], "Mesh"] = {}
"""Cached meshes of a process and the default group, see Mesh.shared().

A forked process keeps the ones that it inherits: a group of gloo waits for the threads when it is
destroyed, and they are in the other process.
"""


class Mesh:
    """Mesh of all processes as dp_replicate x dp_shard x sp x tp, where tp varies fastest.

    `data` combines dp_replicate and dp_shard. Its size is the number of data-parallel replicas that
    samplers, accumulation, denominators and metrics count. `model_parallel` combines sp and tp: the
    ranks of one data-parallel replica. They hold the same prompts and samples, and rank 0 acts for
    all where only one may act. `world` combines all axes.

    `ep` divides the experts of a mixture over consecutive ranks of dp_shard x sp. They have
    different tokens, so the axis shares the ranks of others and makes no further replicas.
    """

    def __init__(
        self,
        device_type: str,
        *,
        dp_replicate: int = 1,
        sp: int = 1,
        tp: int = 1,
        ep: int = 1,
        timeout: timedelta | None = None,
    ):
        """Build the axes.

        `timeout` limits each collective; subgroups do not inherit the timeout of the world. Raise
        ValueError, with all reasons, for sizes that cannot form a mesh.
        """
        world_size = dist.get_world_size()
        dp_replicate = dp_replicate or world_size // (sp * tp)
        problems = mesh_problems(world_size, dp_replicate=dp_replicate, sp=sp, tp=tp, ep=ep)
        if problems:
            raise ValueError("; ".join(problems))

        sizes = (dp_replicate, world_size // (dp_replicate * sp * tp), sp, tp)
        self.device_type = device_type
        self._timeout = timeout
        self._ranks = torch.arange(world_size).view(sizes)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {
            tuple(range(world_size)): dist.group.WORLD
        }
        groups = [self._group(dims) for dims in (("dp_replicate",), ("dp_shard", "sp"), ("tp",))]
        self.device_mesh = DeviceMesh.from_group(
            groups, device_type, self._ranks.flatten(1, 2), mesh_dim_names=DEVICE_AXES
        )
        self.world = Axis.of("world", dist.group.WORLD)
        self.data = Axis.of("data", self._group(("dp_replicate", "dp_shard")))
        self.shard = Axis.of("shard", self._group(("dp_shard", "sp")))

        self.replicate, self.sp, self.tp = (
            Axis.of(name, self._group((name,))) for name in ("dp_replicate", "sp", "tp")
        )
        alone = self.replicate.size == 1
        self._sharded = "dp_shard_sp" if alone else ("dp_replicate", "dp_shard_sp")
        """Axes of the meshes over which parameters are divided or copied."""
        self.model_parallel = Axis.of("model_parallel", self._group(("sp", "tp")))
        self.ep = Axis("ep", 1, 0, None)
        self.expert_mesh: DeviceMesh | None = None
        if ep > 1:
            self._divide_experts(ep)
        self._later_axes: dict[tuple[str, int], Axis] = {}
        """Axes that are built at their first use, by name and size."""

        # All other groups were created with it.
        if timeout is not None and self.world.group is not None:
            _set_pg_timeout(timeout, self.world.group)

    @classmethod
    def shared(cls, device_type: str, **sizes: Any) -> "Mesh":
        """Return the mesh of these sizes in the default process group, built at the first call.

        Groups cost threads, and torch caches results by the shape of a mesh, so consecutive
        strategies use the same groups. They end with the process group. All ranks must call this
        together.
        """
        process = os.getpid()
        world = dist.group.WORLD
        for key in [key for key in _meshes if key[0] == process and key[1] is not world]:
            del _meshes[key]
        key = (process, world, device_type, *sorted(sizes.items()))
        if key not in _meshes:
            _meshes[key] = cls(device_type, **sizes)
        return _meshes[key]

    @property
    def parameters(self) -> DeviceMesh:
        """Return the mesh of FSDP: [shard], or [replicate, shard] for hybrid sharding."""
        return self.device_mesh[self._sharded]

    @property
    def expert_parameters(self) -> DeviceMesh:
        """Return the mesh of FSDP for experts that `ep` divides, like `parameters`."""
        return self.expert_mesh[self._sharded]

    @property
    def experts(self) -> DeviceMesh:
        """Return the one-dimensional mesh that the experts of a layer are divided over."""
        return self.expert_mesh["ep"]

    @property
    def tensor(self) -> DeviceMesh:
        """Return the one-dimensional mesh that tensor parallelism splits layers over."""
        return self.device_mesh["tp"]

    def engine(self, size: int) -> Axis:
        """Return the engine's tensor-parallel axis: `size` consecutive ranks of the world.

        The training layout does not matter. Raise ValueError if `size` does not divide the number
        of processes. All ranks must make the first call together.
        """
        if self.world.size % size:
            raise ValueError(
                f"--engine_tp_size {size} does not divide the {self.world.size} processes"
            )
        return self._later_axis("engine", size, self._ranks.view(-1, size))

    def engine_replicas(self, size: int) -> Axis:
        """Return the axis of the ranks with the same index in each engine of `size` ranks.

        All ranks must make the first call together.
        """
        return self._later_axis("replicas", size, self._ranks.view(-1, size).T)

    def gloo_axis(self, name: str) -> Axis:
        """Return all processes with a separate gloo group, for collectives beside others.

        `background` is for a thread, and `exchange` for sums that are exchanged while the engines
        decode. All ranks must make the first call for a name together.
        """
        key = name, self.world.size
        if key not in self._later_axes:
            group = dist.new_group(backend="gloo", timeout=self._timeout)
            self._later_axes[key] = Axis.of(name, group)
        return self._later_axes[key]

    def _divide_experts(self, ep: int) -> None:
        """Build the axis and the mesh of experts.

        The axis has a group of its own even if another one has the same ranks: otherwise tokens
        would wait behind the parameters that FSDP2 gathers ahead.
        """
        ranks = self._ranks.view(self.replicate.size, -1, ep)
        self.ep = Axis.of("ep", self._new_group(ranks.flatten(0, 1), "mesh_ep"))
        shard = self._group_in(ranks.transpose(1, 2).flatten(0, 1), "mesh_expert_shard")
        groups = [self._group(("dp_replicate",)), shard, self.ep.group]
        self.expert_mesh = DeviceMesh.from_group(
            groups, self.device_type, ranks, mesh_dim_names=EXPERT_AXES
        )

    def _group(self, dims: tuple[str, ...]) -> dist.ProcessGroup:
        """Return the group of the ranks that differ from this one in these dimensions only."""
        order = sorted(range(len(AXES)), key=lambda dim: AXES[dim] in dims)
        partition = self._ranks.permute(order).reshape(
            -1, prod(self._ranks.shape[AXES.index(name)] for name in dims)
        )
        return self._group_in(partition, f"mesh_{'_'.join(dims)}")

    def _group_in(self, partition: Tensor, name: str) -> dist.ProcessGroup:
        """Return the group of this rank's row. Equal sets of ranks have one group."""
        key = tuple(_row_of_this_rank(partition))
        if key not in self._groups:
            self._groups[key] = self._new_group(partition, name)
        return self._groups[key]

    def _later_axis(self, name: str, size: int, partition: Tensor) -> Axis:
        """Return the axis of this rank's row of [groups, ranks of a group], built at first use."""
        if partition.shape[1] == 1:
            return Axis(name, 1, 0, None)
        if (name, size) not in self._later_axes:
            self._later_axes[name, size] = Axis.of(name, self._new_group(partition, name))
        return self._later_axes[name, size]

    def _new_group(self, partition: Tensor, name: str) -> dist.ProcessGroup:
        """Create the group of this rank's row of [groups, ranks of a group].

        Only its members meet. If the default group is bound to a device, NCCL splits the
        communicator instead, which takes all ranks for every group.
        """
        ranks = _row_of_this_rank(partition)
        if dist.group.WORLD.bound_device_id is None:
            return dist.new_group(
                ranks, timeout=self._timeout, group_desc=name, use_local_synchronization=True
            )
        groups = [
            dist.new_group(row, timeout=self._timeout, group_desc=name)
            for row in partition.tolist()
        ]
        return groups[partition.tolist().index(ranks)]


def _row_of_this_rank(partition: Tensor) -> list[int]:
    return next(row for row in partition.tolist() if dist.get_rank() in row)


def collectives_begun() -> dict[str, int]:
    """Return how many collectives this process has started, by group and device type.

    Groups of libraries are included. A group has the same name on all the ranks, and they start the
    same collectives: a rank with a lower count is late.
    """
    counts = {}
    for group in list(_world.pg_map):
        for device in group._device_types if group.size() > 1 else ():
            name = f"{group.group_desc} #{group.group_name[:8]} ({device.type})"
            with suppress(RuntimeError):  # of a backend that does not count
                counts[name] = group._get_backend(device)._get_sequence_number_for_group()
    return counts


def mesh_problems(
    world_size: int, *, dp_replicate: int, sp: int, tp: int, ep: int = 1
) -> list[str]:
    """Return all reasons why these sizes cannot form a mesh; empty if they can."""
    sizes = {"dp_replicate": dp_replicate, "sp_size": sp, "tp_size": tp, "ep_size": ep}
    problems = [
        f"{name} must be at least 1, not {size}" for name, size in sizes.items() if size < 1
    ]
    if problems:
        return problems

    product = dp_replicate * sp * tp
    if world_size % product:
        problems.append(
            f"{world_size} processes cannot be split into dp_replicate {dp_replicate} x sp_size"
            f" {sp} x tp_size {tp} = {product}"
        )
    elif world_size // (dp_replicate * tp) % ep:
        problems.append(
            f"ep_size {ep} does not divide the {world_size // (dp_replicate * tp)} ranks that share"
            " the shards of a replica"
        )

    if ep > 1 and tp > 1:
        problems.append(f"ep_size {ep} needs tp_size 1")

    return problems


def process_rank() -> int:
    """Return this process's rank; before there is a process group, the launcher's RANK or 0."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_axis() -> Axis:
    """Return an axis of all processes; without a process group, an axis of this process alone."""
    return (
        Axis.of("world", dist.group.WORLD) if dist.is_initialized() else Axis("world", 1, 0, None)
    )
