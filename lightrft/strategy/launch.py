"""From the launcher's environment to a process group: torchrun, Slurm, or one process without a launcher."""

import json
import os
import re
import time
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightrft.parallel.device import collective_backend

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
MEETING_POINT = ("SLURM_STEP_NODELIST", "SLURM_JOB_ID")
"""MASTER_ADDR is the first node, MASTER_PORT the job's own, unless the user has set them."""
ARRIVAL = timedelta(minutes=10)
"""Longest wait until all processes have started, imported their packages and met."""
ADVICE = "start the run with `torchrun --standalone --nproc-per-node=N ...`, or with none of these variables for one process"


def adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Write what `srun` says under torchrun's names. Left alone: a torchrun inside a Slurm job, one task, no srun at all."""
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
        return
    absent = [name for name in (*SLURM.values(), *MEETING_POINT) if name not in environment]
    if absent:
        raise RuntimeError(
            f"srun started {environment['SLURM_STEP_NUM_TASKS']} tasks, but {', '.join(absent)} is not set: "
            "let srun pass its variables on (--export=ALL)"
        )
    environment.update({name: environment[source] for name, source in SLURM.items()})
    environment.setdefault("MASTER_ADDR", _first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(20000 + int(environment["SLURM_JOB_ID"]) % 10000))


def adopt_node_size(environment: MutableMapping[str, str], num_gpu_per_node: int) -> None:
    """Which device of its node is a rank's own, for launchers that only count ranks; what they say of LOCAL_RANK wins."""
    if "RANK" in environment:
        environment.setdefault("LOCAL_RANK", str(int(environment["RANK"]) % num_gpu_per_node))


def join_process_group(device: torch.device, timeout: timedelta) -> bool:
    """Create the default process group; False when somebody did already. `timeout` is that of its store from then on."""
    if dist.is_initialized():
        return False
    adopt_slurm(os.environ)
    _check_environment(os.environ)
    backend = collective_backend(device)
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return True
    meeting_point = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        dist.init_process_group(backend, init_method="env://", timeout=ARRIVAL)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise RuntimeError(
                f"MASTER_PORT {os.environ['MASTER_PORT']} on {os.environ['MASTER_ADDR']} is in use by another program. "
                "Choose another with `torchrun --master-port PORT`, or let torchrun find a free one: `torchrun --standalone`"
            ) from error
        raise RuntimeError(
            f"rank {os.environ['RANK']} did not meet the other {int(os.environ['WORLD_SIZE']) - 1} at {meeting_point} within "
            f"{ARRIVAL.total_seconds():.0f} s. Either one of them failed before, and its log says why, or it cannot reach that "
            f"address (MASTER_ADDR and MASTER_PORT). torch says: {error}"
        ) from error
    _get_default_store().set_timeout(timeout)
    return True


def tell_launcher(cause: str) -> None:
    """Why this process ends, where torchrun looks for it: it shows the earliest of these last."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        about = {"message": cause, "extraInfo": {"py_callstack": cause, "timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": about}))


def _first_host(nodes: str) -> str:
    """`gpu[07-09,12],fat1` -> `gpu07`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else nodes)


def _check_environment(environment: Mapping[str, str]) -> None:
    present = [name for name in LAUNCHER if name in environment]
    absent = [name for name in LAUNCHER if name not in environment]
    if present and absent:
        raise RuntimeError(f"{', '.join(present)} is set, but {', '.join(absent)} is not: {ADVICE}")
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if name in environment and not environment[name].isdecimal():
            raise RuntimeError(f"{name}={environment[name]!r} is not a number: {ADVICE}")
