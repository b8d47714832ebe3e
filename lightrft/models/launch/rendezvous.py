"""Create the process group that a launcher describes: torchrun, Slurm, or one process alone."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from loguru import logger
from torch.distributed.distributed_c10d import _get_default_store

from lightrft.config.errors import ConfigError
from lightrft.models.launch import orphan_guard
from lightrft.models.launch.interface import choose_interface, interface_problem, master_address
from lightrft.models.launch.monitor import names
from lightrft.models.parallel.device import collective_backend
from lightrft.models.parallel.gloo import INTERFACE, RANKS_IN_ADDRESSES, share_gloo_device
from lightrft.models.parallel.processes import RunProcesses

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}
MEETING_POINT = ("SLURM_STEP_NODELIST", "SLURM_JOB_ID")
"""Slurm variables for MASTER_ADDR, the first node, and MASTER_PORT, derived from the job, unless
the user has set them."""
NUMBERS_OF_NODES = ("NNODES", "PET_NNODES", "SKYPILOT_NUM_NODES")
"""Variables of launchers, Kubeflow and SkyPilot with the number of nodes, as a number or as
MIN:MAX."""
NUMBERS_IN_A_JOB = ("SLURM_NNODES", "SLURM_NTASKS")
"""The same of a Slurm job, whose steps may be smaller."""
NUMBERS_OF_PROCESSES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""The number of processes that mpirun has started: of Open MPI, of MPICH and Intel MPI, of MVAPICH.
"""
NOTICE = timedelta(seconds=30)
"""Interval between warnings about ranks that have not arrived."""
FEW_RANKS = 8
"""Up to so many ranks share one gloo device in all groups; more publish one address each instead,
see models/parallel/gloo.py."""
LAUNCH_ADVICE = (
    "start the run with `torchrun --standalone --nproc-per-node=N ...`, or unset all of these"
    " variables to run one process"
)
_guard: subprocess.Popen | None = None
_num_groups = 0
"""Number of default process groups that this process has joined; equal on all ranks."""


def adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from the variables of `srun`.

    Nothing is changed under torchrun, for one task, or without srun.
    """
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
        return

    absent = [name for name in (*SLURM.values(), *MEETING_POINT) if name not in environment]
    if absent:
        raise ConfigError(
            f"srun started {environment['SLURM_STEP_NUM_TASKS']} tasks, but {', '.join(absent)} is"
            " not set: pass srun's variables on with --export=ALL"
        )

    environment.update({name: environment[source] for name, source in SLURM.items()})
    # Senders of weights, threads and readers of media are counted by node.
    if per_node := ranks_per_node(environment):
        environment.setdefault("LOCAL_WORLD_SIZE", str(per_node))
    environment.setdefault("MASTER_ADDR", _first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(20000 + int(environment["SLURM_JOB_ID"]) % 10000))


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for variables of a launcher that are incomplete."""
    present = [name for name in LAUNCHER_VARIABLES if name in environment]
    absent = [name for name in LAUNCHER_VARIABLES if name not in environment]
    if present and absent:
        raise ConfigError(
            f"{', '.join(present)} is set, but {', '.join(absent)} is not: {LAUNCH_ADVICE}"
        )


def check_launched(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for a process without RANK that must be one of several.

    Its other variables say so, and it would run alone. Variables of a launcher that must be numbers
    are checked too.
    """
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if name in environment and not environment[name].isdecimal():
            raise ConfigError(f"{name}={environment[name]!r} is not a number: {LAUNCH_ADVICE}")

    if "RANK" in environment:
        return

    counts = NUMBERS_OF_NODES + NUMBERS_OF_PROCESSES
    counts += () if "SLURM_STEP_NUM_TASKS" in environment else NUMBERS_IN_A_JOB
    settings = {
        name: environment[name].rpartition(":")[2] for name in counts if name in environment
    }
    several = [name for name, count in settings.items() if count.isdecimal() and int(count) > 1]
    if environment.get("JOB_COMPLETION_INDEX", "0") != "0":
        several.append("JOB_COMPLETION_INDEX")

    if several:
        values = ", ".join(f"{name}={environment[name]}" for name in several)
        raise ConfigError(
            f"{values}: this process is one of several, but it has no rank (RANK is not set) and"
            " would run alone. Start the command on every node with `bash scripts/launch.sh"
            " COMMAND ...`, with torchrun, or with srun (docs/launching.md). For a process that is"
            f" meant to run alone: `env {' '.join(f'-u {name}' for name in several)} COMMAND ...`"
        )


def ranks_per_node(environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks of each node; None if nodes differ or no launcher says it."""
    if "LOCAL_WORLD_SIZE" in environment:
        return int(environment["LOCAL_WORLD_SIZE"])
    per_node = re.fullmatch(r"(\d+)(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return int(per_node[1]) if per_node else None


def adopt_node_size(environment: MutableMapping[str, str], num_gpu_per_node: int) -> None:
    """Set LOCAL_RANK for launchers that set only RANK, because it determines a rank's device."""
    if "RANK" in environment:
        environment.setdefault("LOCAL_RANK", str(int(environment["RANK"]) % num_gpu_per_node))


def end_with_launcher(launcher: int) -> None:
    """Start a guard that ends this rank and its children when `launcher`, a torchrun, ends."""
    global _guard
    if (
        _guard is None
        and "TORCHELASTIC_RUN_ID" in os.environ
        and sys.platform == "linux"
        and os.getpgid(0) == os.getpid()
    ):
        command = [sys.executable, "-IS", orphan_guard.__file__, str(os.getpid()), str(launcher)]
        _guard = subprocess.Popen(
            command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )


def join_process_group(
    device: torch.device, timeout: timedelta, arrival: timedelta, rollout_ranks: int = 0
) -> RunProcesses:
    """Create the default process group, unless it exists already.

    `arrival` is the longest wait until all processes have started, imported packages and connected;
    from then on `timeout` limits calls of the store. Raises ConfigError for an environment that no
    launcher has set up, and RuntimeError for `rollout_ranks` in a group that exists.
    """
    if dist.is_initialized():
        if rollout_ranks:
            raise RuntimeError(
                "--rollout_ranks needs two process groups, but this process has joined one already"
            )
        return RunProcesses(
            _get_default_store(), dist.get_rank(), dist.get_world_size(), timeout, created=False
        )

    end_with_launcher(os.getppid())
    adopt_slurm(os.environ)
    check_environment(os.environ)
    check_launched(os.environ)
    backend = collective_backend(device)
    share_gloo_device()

    if "RANK" not in os.environ:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return RunProcesses(store, 0, 1, timeout)

    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    store = _prefixed_store(_meeting_point(rank, arrival))
    _meet(store, rank, world_size, arrival)
    choose_interface(dist.PrefixStore("arrivals", store), world_size)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    processes = RunProcesses(store, rank, world_size, timeout, rollout_ranks, ranks_per_node)
    if processes.generates:
        first, last = (world_size - rollout_ranks, world_size)
    else:
        first, last = (0, world_size - rollout_ranks)
    side_store = dist.PrefixStore(processes.side, store) if processes.side else store
    if world_size > FEW_RANKS:
        os.environ.setdefault(RANKS_IN_ADDRESSES, "1")

    try:
        dist.init_process_group(
            backend, store=side_store, rank=rank - first, world_size=last - first, timeout=arrival
        )
    except RuntimeError as error:  # gloo's errors are not DistError
        raise RuntimeError(
            f"rank {rank} on {socket.gethostname()} met the other {world_size - 1} at {_address()},"
            " but cannot connect to all of them: one has ended since, and its log has the cause,"
            " or a firewall blocks the connections, or a rank listens on an address that others"
            f" cannot reach. {_local_interface()}. torch's message: {error}"
        ) from error

    store.set_timeout(timeout)
    return processes


def _local_interface() -> str:
    chosen = os.environ.get(INTERFACE)
    if chosen:
        used = f"This rank listens on the interface {chosen} ({INTERFACE})"
    else:
        used = f"{INTERFACE} is not set"
    return interface_problem() or f"{used}: it must be the interface between the nodes"


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _meeting_point(rank: int, arrival: timedelta) -> dist.Store:
    """Return the store; torchrun serves it on the first node, without torchrun rank 0 does.

    Torch's own rendezvous is not used, because it waits for all ranks without reporting which are
    missing.
    """
    serves = rank == 0 and not _launcher_serves()
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    try:
        return dist.TCPStore(
            host, port, is_master=serves, timeout=arrival, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise RuntimeError(
                f"MASTER_PORT {os.environ['MASTER_PORT']} on {os.environ['MASTER_ADDR']} is in use"
                " by another program. Choose another with `torchrun --master-port PORT`, or let"
                " torchrun find a free one: `torchrun --standalone`"
            ) from error

        raise RuntimeError(
            f"rank {rank} on {socket.gethostname()} found no other rank at {_address()}"
            f" (MASTER_ADDR and MASTER_PORT) within {_minutes(arrival)}. Either the first node has"
            " not started its ranks, or they ended, and its log has the cause, or this node cannot"
            f" reach that address. torch's message: {error}"
        ) from error


def _prefixed_store(store: dist.Store) -> dist.Store:
    """Return the store with a prefix for this process group.

    Torchrun's store outlives groups and restarts. A store of rank 0 is new in each restart, and
    different torchruns count restarts differently when a node is lost or added.
    """
    global _num_groups
    _num_groups += 1
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0) if _launcher_serves() else 0
    return dist.PrefixStore(f"lightrft/{restart}/{_num_groups}", store)


def _launcher_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _meet(store: dist.Store, rank: int, world_size: int, arrival: timedelta) -> None:
    """Wait until all ranks have arrived; meanwhile one rank of each node logs which are missing.

    RuntimeError at the deadline.
    """
    arrivals = dist.PrefixStore("arrivals", store)
    arrivals.set(str(rank), master_address())
    # The store answers one key of each rank, not all keys of each.
    if arrivals.add("number", 1) == world_size:
        arrivals.set("complete", "")

    deadline = time.monotonic() + arrival.total_seconds()
    while True:
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.01))
        try:
            return arrivals.wait(["complete"], min(left, NOTICE))
        except dist.DistStoreError as late:
            absent = names(other for other in range(world_size) if not arrivals.check([str(other)]))
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"{absent} did not connect to {_address()} within {_minutes(arrival)}, where"
                    f" rank {rank} on {socket.gethostname()} waited. Either they failed before, and"
                    " the log of their node has the cause, or they cannot reach that address"
                ) from late

            if os.environ.get("LOCAL_RANK", "0") == "0":
                logger.warning(
                    f"waiting at {_address()} for {absent}, at most {left.total_seconds():.0f} s:"
                    " have they failed?"
                )
        except dist.DistError as error:
            raise RuntimeError(
                f"rank {rank} on {socket.gethostname()} waited at {_address()} for the others, and"
                " the rendezvous server is gone: the first node has ended, and its log has the"
                f" cause. torch's message: {error}"
            ) from error


def _minutes(arrival: timedelta) -> str:
    return f"{arrival.total_seconds():.0f} s (--arrival_minutes {arrival.total_seconds() / 60:g})"


def launcher() -> str:
    """Return a name for the torchrun that started this process; empty without one.

    Processes that it restarts get the same name.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    try:
        began = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
    return f"torchrun {os.getppid()} on {socket.gethostname()}, started at {began}"


def tell_launcher(cause: str) -> None:
    """Write why this process ends to torchrun's error file.

    Torchrun reports the earliest error of all ranks.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        about = {
            "message": cause,
            "extraInfo": {"py_callstack": cause, "timestamp": str(int(time.time()))},
        }
        Path(file).write_text(json.dumps({"message": about}))


def _first_host(nodes: str) -> str:
    """Return the first host of a node list: `gpu[07-09,12],fat1` -> `gpu07`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else nodes)
