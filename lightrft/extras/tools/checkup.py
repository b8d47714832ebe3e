"""Check the machine for a run: packages, device, memory, disk, and the network of one node.

Each problem comes with a solution.
"""

import platform
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from lightrft.config.tables import table
from lightrft.core.metrics import GB
from lightrft.models.launch.interface import interface_problem
from lightrft.models.parallel.device import current_device, free_memory
from lightrft.versions import (
    CORE,
    ENGINE_VERSIONS,
    EXTRAS,
    installed_version,
    untested_versions,
    version_problems,
)

PROBLEMS: dict[str, str] = table("extras/tools/checkup")
SHARED_MEMORY = Path("/dev/shm")
RENDEZVOUS_PORT = 29500
"""Port where the processes of torchrun meet by default."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    finding: str
    problem: str = ""
    """What is wrong and how to solve it; empty if nothing is."""
    fatal: bool = False
    """True if nothing can run; a problem that is not fatal may matter later."""


def checkup(folder: Path) -> list[Check]:
    """Check this process's machine, for runs that are written to `folder`."""
    memory = [_host_memory(), _disk(folder), _shared_memory()]
    return [*_packages(), *_engines(), _device(), *memory, _name(), _port()]


def _packages() -> list[Check]:
    core = "; ".join(version_problems(CORE))
    others = [pins for extra, pins in EXTRAS.items() if extra not in ENGINE_VERSIONS]
    optional = [problem for pins in others for problem in version_problems(pins, optional=True)]
    named = f"Python {platform.python_version()}, {_installed(['torch', 'transformers'])}"

    return [
        Check("packages", named, core, fatal=bool(core)),
        Check("optional packages", _extras(), "; ".join(optional)),
    ]


def _extras() -> str:
    names = dict.fromkeys(
        name for extra, pins in EXTRAS.items() if extra not in ("docs", "dev") for name in pins
    )
    return _installed(names) or "none"


def _installed(names: Iterable[str]) -> str:
    found = [f"{name} {version}" for name in names if (version := installed_version(name))]
    return ", ".join(found)


def _engines() -> list[Check]:
    """Check the versions of the installed engines against the tested ones."""
    installed = {name: each for name, each in ENGINE_VERSIONS.items() if installed_version(name)}
    if not installed:
        return [Check("engine", "hf alone", PROBLEMS["engine"])]

    untested = {name: untested_versions({name: tested}) for name, tested in installed.items()}
    return [
        Check(f"engine {name}", str(installed_version(name)), "; ".join(map(str, problems)))
        for name, problems in untested.items()
    ]


def _device() -> Check:
    device = current_device()
    if device.type == "cpu":
        threads = torch.get_num_threads()
        found = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        return Check("device", found, PROBLEMS["device"])

    count = torch.accelerator.device_count()
    free, total = free_memory(device)
    # This process has a context of its own there, so a little does not count.
    busy = f"{(total - free) / GB:.0f} GB are used by other programs" if free < 0.9 * total else ""

    found = f"{count} x {device.type}, {total / GB:.0f} GB each, {free / GB:.0f} GB free"
    return Check("device", found, busy)


def _host_memory() -> Check:
    memory = psutil.virtual_memory()
    problem = PROBLEMS["host memory"] if memory.available < 4 * GB else ""
    found = f"{memory.total / GB:.0f} GB, {memory.available / GB:.0f} GB free"
    return Check("host memory", found, problem)


def _disk(folder: Path) -> Check:
    around = (folder.absolute(), *folder.absolute().parents)
    existing = next(path for path in around if path.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / GB:.0f} GB free in {existing}"
    return Check("disk", found, PROBLEMS["disk"] if free < 20 * GB else "")


def _shared_memory() -> Check:
    if not SHARED_MEMORY.is_dir():
        problem = PROBLEMS["no shared memory"].format(folder=SHARED_MEMORY)
        return Check("shared memory", "none", problem)

    free = shutil.disk_usage(SHARED_MEMORY).free
    found = f"{free / GB:.1f} GB free in {SHARED_MEMORY}"
    return Check("shared memory", found, PROBLEMS["shared memory"] if free < GB else "")


def _name() -> Check:
    name = socket.gethostname()
    try:
        return Check("host name", f"{name} is {socket.gethostbyname(name)}", interface_problem())
    except OSError as error:
        return Check("host name", name, PROBLEMS["host name"].format(error=error))


def _port() -> Check:
    with socket.socket() as probe:
        try:
            probe.bind(("", RENDEZVOUS_PORT))
        except OSError:
            return Check("port", str(RENDEZVOUS_PORT), PROBLEMS["port"])
    return Check("port", f"{RENDEZVOUS_PORT} is free")
