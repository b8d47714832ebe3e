"""All-gathers of large tensors.

On CPUs, ranks of one host use shared memory, many times faster than sockets. The memory has no name
in a file system (memfd): the first rank creates it, the others open it through that rank's files in
/proc, and it is freed with the last of them, however they end. The size of /dev/shm does not
matter.
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

from lightrft.models.parallel.collectives import Axis

HALF_BYTES = 20 * 2**20
"""Bytes of each half of a group's shared memory; pages that are never written take no memory."""


class AllGather:
    """All-gather of `count` elements of each rank of a group.

    Fill `local`, call run(), read `gathered` [ranks, count]. If `in_shared_memory` is True,
    `gathered` is overwritten by the second all-gather after this one.
    """

    def __init__(
        self, count: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
    ):
        self.group = group
        rank = dist.get_rank(group)
        size = dist.get_world_size(group)
        self.shared = _shared_memory(group) if device.type == "cpu" else None
        self.in_shared_memory = (
            self.shared is not None and size * count * dtype.itemsize <= HALF_BYTES
        )

        if self.in_shared_memory:
            self.gathered = self.shared.slots(size, count, dtype)
        else:
            self.gathered = torch.empty(size, count, dtype=dtype, device=device)

        self.local = self.gathered[rank]

    def run(self) -> None:
        if self.shared is None:
            dist.all_gather_into_tensor(self.gathered.view(-1), self.local, group=self.group)
        elif self.in_shared_memory:
            self.shared.meet()
        else:
            self.shared.gather(self.gathered, self.local)


class SharedMemory:
    """Two halves of HALF_BYTES that are written alternately.

    One barrier for each is enough: a rank that reaches it has read the other half, which is written
    next.
    """

    def __init__(self, memory: mmap.mmap, axis: Axis):
        self.memory = memory
        self.axis = axis
        self.begin = 0
        """Start of the current half, in bytes."""

    def slots(self, size: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return the start of the current half as a tensor [size, count]."""
        half = torch.frombuffer(self.memory, dtype=torch.uint8, count=HALF_BYTES, offset=self.begin)
        return half[: size * count * dtype.itemsize].view(dtype).view(size, count)

    def meet(self) -> None:
        """Wait until all ranks have written, and switch to the other half.

        Then every rank can read.
        """
        self.axis.barrier()
        self.begin = HALF_BYTES - self.begin

    def gather(self, gathered: Tensor, local: Tensor) -> None:
        """Gather `local` [N] of every rank into `gathered` [ranks, N], half by half."""
        count = HALF_BYTES // self.axis.size // local.itemsize
        for chunk, gathered_chunk in zip(
            local.split(count), gathered.split(count, dim=1), strict=True
        ):
            slots = self.slots(*gathered_chunk.shape, local.dtype)
            slots[self.axis.rank].copy_(chunk)
            self.meet()
            gathered_chunk.copy_(slots)


_of_groups: WeakKeyDictionary[dist.ProcessGroup, SharedMemory | None] = WeakKeyDictionary()


def _shared_memory(group: dist.ProcessGroup) -> SharedMemory | None:
    """Return the shared memory of a group; None if the ranks cannot share memory.

    It is created when all of them first call this.
    """
    if group not in _of_groups:
        axis = Axis.of("shared", group)
        memory = _mapped_together(axis)
        _of_groups[group] = None if memory is None else SharedMemory(memory, axis)
    return _of_groups[group]


def _mapped_together(axis: Axis) -> mmap.mmap | None:
    """Map the first rank's memory on all ranks.

    Return None on all ranks if one is on another host or may not open the file.
    """
    hosts = set(axis.gather(_host()))
    if len(hosts) > 1 or "" in hosts:
        return None

    # All ranks call the collectives below, whatever fails on one of them.
    file = os.memfd_create("lightrft-gather") if axis.rank == 0 else -1
    if axis.rank == 0:
        os.ftruncate(file, 2 * HALF_BYTES)
    path = axis.broadcast(f"/proc/{os.getpid()}/fd/{file}")
    memory = None
    problem = ""

    try:
        with open(path, "r+b") as opened:
            memory = mmap.mmap(opened.fileno(), 2 * HALF_BYTES)
    except OSError as error:
        problem = str(error)

    problems = [each for each in axis.gather(problem) if each]
    if axis.rank == 0:
        os.close(file)
        if problems:
            logger.warning(
                f"{axis.size} ranks gather through sockets, because they cannot share memory:"
                f" {problems[0]}"
            )

    return None if problems else memory


def _host() -> str:
    """Return an identifier that is equal for ranks that see each other's files in /proc.

    It is empty on systems other than Linux.
    """
    if sys.platform != "linux":
        return ""
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
