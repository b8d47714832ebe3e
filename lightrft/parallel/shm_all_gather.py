"""All-gathers of much at once. On CPUs ranks of one host share memory for it: through sockets it takes many times as long.

That memory has no name in a file system (memfd): the first rank makes it, the others open it where /proc shows that rank's files,
and it is gone with the last of them, however they end. The size of /dev/shm does not matter.
"""

import mmap
import os
import sys
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor

from lightrft.parallel.collectives import Axis

HALF_BYTES = 20 * 2**20
"""Of the two halves of a group's shared memory; pages that nothing is written to take no memory."""


class AllGather:
    """One all-gather of `count` elements of each rank of a group: fill `mine`, run(), read `everyone` [ranks, count].

    `passing`: the one after the next overwrites `everyone`.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup):
        self.group, rank, size = group, dist.get_rank(group), dist.get_world_size(group)
        self.shared = _shared_memory(group) if device.type == "cpu" else None
        self.passing = self.shared is not None and size * count * dtype.itemsize <= HALF_BYTES
        if self.passing:
            self.everyone = self.shared.rooms(size, count, dtype)
        else:
            self.everyone = torch.empty(size, count, dtype=dtype, device=device)
        self.mine = self.everyone[rank]

    def run(self) -> None:
        if self.shared is None:
            dist.all_gather_into_tensor(self.everyone.view(-1), self.mine, group=self.group)
        elif self.passing:
            self.shared.meet()
        else:
            self.shared.gather(self.everyone, self.mine)


class SharedMemory:
    """Two halves of HALF_BYTES, which are written in turns.

    One barrier for each is enough: who has passed it has read the other half, which is written next.
    """

    def __init__(self, memory: mmap.mmap, axis: Axis):
        self.memory, self.axis = memory, axis
        self.begin = 0
        """Of the half whose turn it is, in bytes."""

    def rooms(self, size: int, count: int, dtype: torch.dtype) -> Tensor:
        """[size, count] of the half whose turn it is."""
        half = torch.frombuffer(self.memory, dtype=torch.uint8, count=HALF_BYTES, offset=self.begin)
        return half[: size * count * dtype.itemsize].view(dtype).view(size, count)

    def meet(self) -> None:
        """From here on every rank reads what all have written, and the other half comes next."""
        self.axis.barrier()
        self.begin = HALF_BYTES - self.begin

    def gather(self, everyone: Tensor, mine: Tensor) -> None:
        """everyone [ranks, N] <- mine [N] of every rank, in parts that fit."""
        count = HALF_BYTES // self.axis.size // mine.itemsize
        for part, parts in zip(mine.split(count), everyone.split(count, dim=1), strict=True):
            rooms = self.rooms(*parts.shape, mine.dtype)
            rooms[self.axis.rank].copy_(part)
            self.meet()
            parts.copy_(rooms)


_of_groups: WeakKeyDictionary[dist.ProcessGroup, SharedMemory | None] = WeakKeyDictionary()


def _shared_memory(group: dist.ProcessGroup) -> SharedMemory | None:
    """Made when the ranks of a group, all of them, first ask for it; None where they cannot share memory."""
    if group not in _of_groups:
        axis = Axis("shared", dist.get_world_size(group), dist.get_rank(group), group)
        memory = _mapped_together(axis)
        _of_groups[group] = None if memory is None else SharedMemory(memory, axis)
    return _of_groups[group]


def _mapped_together(axis: Axis) -> mmap.mmap | None:
    """None, on all ranks, where one of them is on another host or may not look at the first one's files."""
    hosts = set(axis.gather(_host()))
    if len(hosts) > 1 or "" in hosts:
        return None
    file = _new_file() if axis.rank == 0 else -1
    path, memory, problem = axis.broadcast(f"/proc/{os.getpid()}/fd/{file}"), None, ""
    try:
        with open(path, "r+b") as opened:
            memory = mmap.mmap(opened.fileno(), 2 * HALF_BYTES)
    except OSError as error:
        problem = str(error)
    problems = [each for each in axis.gather(problem) if each]
    if axis.rank == 0:
        os.close(file)
        if problems:
            logger.warning("{} ranks gather through sockets, as they cannot share memory: {}", axis.size, problems[0])
    return None if problems else memory


def _new_file() -> int:
    file = os.memfd_create("lightrft-gather")
    os.ftruncate(file, 2 * HALF_BYTES)
    return file


def _host() -> str:
    """The same for ranks that see each other's files in /proc; empty where there is no such thing."""
    if sys.platform != "linux":
        return ""
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
