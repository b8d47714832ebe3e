"""From the launcher's environment to a process group: torchrun, Slurm, or one process without a launcher."""

import os
from collections.abc import Mapping, MutableMapping
from datetime import timedelta

import torch
import torch.distributed as dist

from lightrft.parallel.device import collective_backend

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
ADVICE = "start the run with `torchrun --standalone --nproc-per-node=N ...`, or with none of these variables for one process"


def adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Write what `srun` says under torchrun's names. A torchrun inside a Slurm job, and a job of one task, stay as they are."""
    if "RANK" in environment or int(environment.get("SLURM_NTASKS", 1)) == 1:
        return
    absent = [name for name in (*SLURM.values(), "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if absent:
        raise RuntimeError(
            f"Slurm started {environment['SLURM_NTASKS']} tasks, but {', '.join(absent)} is not set. "
            "Start the processes with srun, and export MASTER_ADDR (the first node) and MASTER_PORT (a free port) before it"
        )
    environment.update({name: environment[source] for name, source in SLURM.items()})


def join_process_group(device: torch.device, timeout: timedelta) -> bool:
    """Create the default process group; False when somebody did already."""
    if dist.is_initialized():
        return False
    adopt_slurm(os.environ)
    _check_environment(os.environ)
    backend = collective_backend(device)
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return True
    try:
        dist.init_process_group(backend, init_method="env://", timeout=timeout)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error) and "already in use" not in str(error):
            raise
        raise RuntimeError(
            f"MASTER_PORT {os.environ['MASTER_PORT']} on {os.environ['MASTER_ADDR']} is in use by another program. "
            "Choose another with `torchrun --master-port PORT`, or let torchrun find a free one: `torchrun --standalone`"
        ) from error
    return True


def _check_environment(environment: Mapping[str, str]) -> None:
    present = [name for name in LAUNCHER if name in environment]
    absent = [name for name in LAUNCHER if name not in environment]
    if present and absent:
        raise RuntimeError(f"{', '.join(present)} is set, but {', '.join(absent)} is not: {ADVICE}")
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if name in environment and not environment[name].isdecimal():
            raise RuntimeError(f"{name}={environment[name]!r} is not a number: {ADVICE}")
