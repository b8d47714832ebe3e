"""Share one device of gloo between all gloo groups of a process.

So one thread waits for all sockets. torch opens a device for each group. The thread of a device
wakes a hundred times a second, also while nothing is sent: a rank with vLLM on a CPU has 17 groups,
and the threads take 2 % of a core together.
"""

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import Store
from torch.distributed.distributed_c10d import ProcessGroupGloo

INTERFACE = "GLOO_SOCKET_IFNAME"
RANKS_IN_ADDRESSES = "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"
"""Variable of gloo: each rank publishes one address instead of one for each other rank.

All ranks would read those. A device then knows the connections by the rank of the other process
alone, so groups of several processes cannot share it.
"""

_create = ProcessGroupGloo.__init__


def share_gloo_device() -> None:
    """Let gloo groups that this process creates from now on share a device where they can.

    It listens on the interfaces of GLOO_SOCKET_IFNAME, as torch's own devices do.
    """
    ProcessGroupGloo.__init__ = _create_with_shared_device


def _create_with_shared_device(
    group: ProcessGroupGloo,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta | Any,
    **options: Any,
) -> None:
    by_rank = RANKS_IN_ADDRESSES in os.environ
    # torch 2.14 passes options that are False by default.
    if any(options.values()) or not isinstance(timeout, timedelta) or (by_rank and size > 1):
        return _create(group, store, rank, size, timeout, **options)
    shared = ProcessGroupGloo._Options()
    shared._devices = _devices(os.getpid(), os.environ.get(INTERFACE, ""), by_rank)
    shared._threads = 2 * len(shared._devices)  # as torch has
    shared._timeout = timeout
    return _create(group, store, rank, size, shared)


@cache
def _devices(process: int, interfaces: str, by_rank: bool) -> list[ProcessGroupGloo.Device]:
    """Return the devices of a process.

    A forked process needs its own: it does not have the threads of the ones that it inherits. A
    device reads the variable of `by_rank` when it is created, and serves only groups that are
    created with the same value.
    """
    if not interfaces:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
