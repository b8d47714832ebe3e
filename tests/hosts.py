"""Call functions in forks of processes that have imported an engine.

The import of an engine takes longer than most of what is tested, so one process imports it for all
tests, also for other workers, and is forked for each call.
"""

import fcntl
import gc
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fork_server import serve

ROOT = Path(__file__).resolve().parent.parent
PREFIX = Path(f"{sys.prefix}-sglang")
"""Environment with SGLang and torchvision, which lies over the tests' own."""
OWN = os.pathsep.join(map(str, [ROOT, ROOT / "tests"]))
SEARCHED = os.pathsep.join([str(ROOT / "tests" / "sglang_stand_ins"), OWN])


class Host(NamedTuple):
    prefix: Path
    environment: dict[str, str]


HOSTS = {
    # Otherwise a C++ compiler takes half a minute for the mask of a divided embedding.
    "sglang": Host(PREFIX, {"TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": SEARCHED}),
    "vllm": Host(PREFIX, {"WITH_VLLM": "1", "PYTHONPATH": SEARCHED}),
    "interpreter": Host(
        Path(sys.prefix),
        {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": OWN},
    ),
}
"""Processes: SGLang, vLLM beside torchvision, and vLLM's Model Runner V2, whose kernels Triton
interprets."""


def where_triton_interprets(function: Callable[..., Any], *args: Any, timeout: float = 600) -> Any:
    """Run `function(*args)` in a fork of a process in which Triton interprets its kernels.

    Triton decides that when it is imported. The process has vLLM with Model Runner V2.
    """
    with tempfile.TemporaryDirectory() as folder:
        return answer_of("interpreter", Path(folder), {}, True, function, args, timeout)


def answer_of(
    host: str,
    folder: Path,
    environment: dict[str, str],
    spawns: bool,
    function: Callable[..., Any],
    args: tuple,
    timeout: float,
) -> Any:
    """Return what a fork of this host answers in the folder.

    The function, its arguments and its result travel by pickle, so it must live in a module that
    can be imported. What it raises, a dead process or the time limit (seconds) raise RuntimeError
    here. Unless it `spawns`, processes that an engine would start afresh are forked (spares.py).
    """
    environment = os.environ | HOSTS[host].environment | environment
    (folder / "call").write_bytes(
        pickle.dumps((environment, spawns, pickle.dumps((function, args))))
    )
    ended = _call(host, folder, timeout)
    said = (folder / "output").read_text(errors="replace")[-20_000:]
    if not (folder / "answer").exists():
        raise RuntimeError(f"{function} ended with {ended} within {timeout} s and said:\n{said}")

    result, error = pickle.loads((folder / "answer").read_bytes())
    if error:
        raise RuntimeError(f"{said}\n{error}")
    return result


def _call(host: str, folder: Path, timeout: float) -> str:
    """Return how the fork ended that answers in this folder; nothing of it is left."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(_address(host))
        line.settimeout(timeout)
        line.send(str(folder).encode())
        try:
            return line.recv(32).decode()
        except TimeoutError:
            line.shutdown(socket.SHUT_WR)
            line.settimeout(None)
            line.recv(32)
            return "nothing"


@cache
def _address(host: str) -> str:
    """Return the address of a host.

    The first test that wants it starts it, and it ends with the whole test run.
    """
    folder = Path(os.environ["TEST_RUN"])
    address = folder / host
    said = folder / f"{host}.output"
    with open(folder / f"{host}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            python = HOSTS[host].prefix / "bin" / "python"
            if not python.exists():
                raise RuntimeError(
                    f"no environment with SGLang at {PREFIX}: make it with `bash"
                    " scripts/environment.sh test`"
                )

            owner = os.environ["TEST_RUN_PROCESS"]
            command = [python, "-W", "ignore", __file__, host, address, owner]
            with open(said, "w") as output:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=os.environ | HOSTS[host].environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,
                )

            # Libraries may print at their import.
            if b"ready\n" not in iter(process.stdout.readline, b""):
                raise RuntimeError(f"{host} cannot be imported:\n{said.read_text()}")

    return str(address)


def _serve(host: str, address: str, owner: int) -> None:
    """Fork a process for each line until the process `owner` has ended."""
    match host:
        case "sglang":
            # before all of SGLang, as it sets its environment
            importlib.import_module("lightrft.engine.sglang")
            logging.disable()  # many models need what is not here
            registry = importlib.import_module("sglang.srt.models.registry").ModelRegistry
            registry._load_default_models()
            logging.disable(logging.NOTSET)
        case "vllm":
            importlib.import_module("with_vllm").load_vllm()
            importlib.import_module("torchvision")
        case "interpreter":
            importlib.import_module("engine.runner_v2").import_it()

    for name in ("runs", "engine.contract"):  # which most calls would import
        importlib.import_module(name)
    importlib.import_module("ranks").import_packages()
    # Unlike forks of the tests these may thaw it: a host has no threads that objects wait for.
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address)
    listening.listen(64)
    print("ready", flush=True)
    serve(listening, os.pidfd_open(owner), _attend)


def _attend(line: socket.socket) -> None:
    """Fork the process that answers in the folder of the line, and say how it ended.

    It is killed when nobody waits for it.
    """
    try:
        folder = Path(line.recv(4096).decode())
        process = os.fork()
        if not process:
            line.close()
            _answer(folder)
        select.select([os.pidfd_open(process), line], [], [])
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.kill(process, signal.SIGKILL)  # it may not have begun a group
        line.send(str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())
    finally:
        os._exit(0)


def _answer(folder: Path) -> None:
    try:
        os.setsid()
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1), os.dup2(output, 2)
        environment, spawns, call = pickle.loads((folder / "call").read_bytes())
        os.environ.update(environment)
        if not spawns:
            import spares

            spares.for_each_child()
        try:
            function, args = pickle.loads(call)
            answer = function(*args), ""
        except BaseException:
            answer = None, traceback.format_exc()
        (folder / "answer.part").write_bytes(pickle.dumps(answer))
        os.rename(folder / "answer.part", folder / "answer")
    finally:
        os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
