"""Groups of the axes: their ranks, and which ranks meet to create them."""

import itertools
import multiprocessing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from lightrft.models.parallel.mesh import Mesh
from ranks import run_ranks

DEVICES = (None, torch.device("cuda:0"))


def axes_and_calls(device: torch.device | None) -> tuple[dict[str, list[int]], list[list[int]]]:
    """Return the ranks of each axis, and the calls that create groups.

    The default group is bound to a device or to none.
    """
    calls = []
    original = dist.new_group

    def recorded(ranks: list[int], **options: Any) -> dist.ProcessGroup:
        """Record a call; gloo has no group that is bound to a device."""
        calls.append(ranks)
        dist.group.WORLD.bound_device_id = None
        group = original(ranks, **options)
        dist.group.WORLD.bound_device_id = device
        return group

    dist.group.WORLD.bound_device_id = device
    dist.new_group = device_mesh.new_group = recorded
    mesh = Mesh("cpu", dp_replicate=2, sp=2, tp=2)
    axes = {
        "data": mesh.data,
        "replicate": mesh.replicate,
        "sp": mesh.sp,
        "tp": mesh.tp,
        "model_parallel": mesh.model_parallel,
        "engine": mesh.engine(4),
        "replicas": mesh.engine_replicas(4),
    }
    dist.group.WORLD.bound_device_id = None
    dist.new_group = original
    device_mesh.new_group = original
    for axis in axes.values():
        assert axis.sum(torch.ones(())) == axis.size

    return {name: dist.get_process_group_ranks(axis.group) for name, axis in axes.items()}, calls


def test_axes_have_their_ranks_and_ranks_meet_as_the_library_needs():
    """tp varies fastest.

    NCCL splits a bound group, so all ranks make the same calls; otherwise only members make one.
    """
    expected = [
        {
            "data": [r % 4, r % 4 + 4],
            "replicate": [r % 4, r % 4 + 4],
            "sp": [r // 4 * 4 + r % 2, r // 4 * 4 + r % 2 + 2],
            "tp": [r // 2 * 2, r // 2 * 2 + 1],
            "model_parallel": list(range(r // 4 * 4, r // 4 * 4 + 4)),
            "engine": list(range(r // 4 * 4, r // 4 * 4 + 4)),
            "replicas": [r % 4, r % 4 + 4],
        }
        for r in range(8)
    ]
    by_rank = run_ranks(8, lambda: [axes_and_calls(device) for device in DEVICES])

    for device, results in zip(DEVICES, zip(*by_rank, strict=True), strict=True):
        assert [axes for axes, _ in results] == expected
        calls = [calls for _, calls in results]
        if device is None:
            assert all(rank in ranks for rank, mine in enumerate(calls) for ranks in mine)
        else:
            assert all(mine == calls[0] for mine in calls) and set(
                itertools.chain(*calls[0])
            ) == set(range(8))


def separate_mesh(folder: Path, name: str) -> None:
    """Build a mesh in a process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=0, world_size=1)
    Mesh.shared("cpu")
    dist.destroy_process_group()


def exit_code_of_a_forked_process(folder: Path) -> int | None:
    """Return the exit code; None if the process does not end."""
    dist.destroy_process_group()
    separate_mesh(folder, "first")
    process = multiprocessing.get_context("fork").Process(
        target=separate_mesh, args=(folder, "second")
    )
    process.start()
    process.join(60)
    exit_code = process.exitcode
    process.kill()
    return exit_code


def test_a_forked_process_leaves_the_groups_of_its_parent_alone(tmp_path):
    """gloo's groups wait for their threads when they are destroyed, and a fork has none of them."""
    assert run_ranks(1, exit_code_of_a_forked_process, tmp_path) == [0]


def expert_axes(replicas: int, sp: int, ep: int) -> list[list[int]]:
    mesh = Mesh("cpu", dp_replicate=replicas, sp=sp, ep=ep)
    shard = mesh.expert_mesh["dp_shard_sp"].get_group()
    return [dist.get_process_group_ranks(group) for group in (mesh.ep.group, shard)]


def test_experts_are_divided_over_neighbours_inside_of_a_replica():
    assert [run_ranks(4, expert_axes, *sizes) for sizes in ((1, 1, 2), (2, 1, 2), (1, 2, 4))] == [
        [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]],
        [[[0, 1], [0]], [[0, 1], [1]], [[2, 3], [2]], [[2, 3], [3]]],
        [[[0, 1, 2, 3], [rank]] for rank in range(4)],
    ]
