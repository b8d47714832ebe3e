"""Groups of gloo share a device and so a thread, and otherwise are as torch creates them."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from lightrft.models.parallel import gloo
from ranks import run_ranks

TIMEOUT = timedelta(seconds=77)


def threads() -> int:
    """Count the threads of this process that wait for sockets of gloo."""
    return sum(
        task.read_text() == "gloo_tcp_loop\n" for task in Path("/proc/self/task").glob("*/comm")
    )


def sums_and_threads(variables: dict[str, str]) -> tuple[list[float], int, int]:
    """Return sums over groups of two and of one rank, and the threads before and after.

    `variables` are set between.
    """
    before = threads()
    rank = dist.get_rank()
    os.environ.update(variables)
    pairs = [dist.new_group([0, 1], timeout=TIMEOUT) for _ in range(4)]
    alone = [
        dist.new_group([rank], timeout=TIMEOUT, use_local_synchronization=True) for _ in range(4)
    ]

    sums = []
    for group in pairs + alone:
        value = torch.full((), 2.0**rank)
        dist.all_reduce(value, group=group)
        sums.append(value.item())
        assert group._get_backend(torch.device("cpu")).options._timeout == TIMEOUT

    return sums, before, threads()


@pytest.mark.parametrize(
    ("variables", "created"),
    [({}, 0), ({gloo.RANKS_IN_ADDRESSES: "1"}, 5), ({gloo.INTERFACE: "lo"}, 1)],
    ids=str,
)
def test_groups_share_a_device_where_they_can(variables, created):
    """A device that knows its connections by rank alone is shared by groups of one rank only.

    Others belong to an interface.
    """
    for rank, (sums, before, after) in enumerate(run_ranks(2, sums_and_threads, variables)):
        assert sums == [3.0] * 4 + [2.0**rank] * 4 and (before, after) == (1, 1 + created)


def refused(variables: dict[str, str]) -> str:
    os.environ.update(variables)
    with pytest.raises(RuntimeError) as error:
        dist.new_group([0])
    return str(error.value)


def test_an_interface_that_does_not_exist_is_named():
    name = "none0"
    assert name not in [name for _, name in socket.if_nameindex()]
    assert name in run_ranks(1, refused, {gloo.INTERFACE: name})[0]


def groups_of_options(folder: Path) -> timedelta:
    """Check that a group with options from its creator keeps them."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_default_device()]
    options._timeout = TIMEOUT
    return ProcessGroupGloo(
        dist.FileStore(str(folder / "store"), 1), 0, 1, options
    ).options._timeout


def test_options_of_a_caller_are_kept(tmp_path):
    assert run_ranks(1, groups_of_options, tmp_path) == [TIMEOUT]
