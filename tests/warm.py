"""`python`, `torchrun` and `lightrft` as forks of a warm process that has imported everything.

A fresh interpreter needs about nine seconds of CPU until it has imported what a run imports, and a
launcher three. A test puts `warm_programs()` first in PATH, and starts scripts and commands as
users do: arguments, environment, folder, standard streams, signals, exit codes, processes and ranks
are real. Only the imports come from the process that runs the tests.

PATH has small programs. Each sends its request to a process that was forked from this one, and ends
as its fork ends. The ranks of `torchrun` are its children, because the death of either has
consequences: it forks them before it has threads.
"""

import atexit
import json
import logging
import os
import pickle
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path

from fork_server import serve
from ranks import import_packages
from with_vllm import load_vllm

RUNS = (
    "lightrft.app.trainer.build",
    "lightrft.app.trainer.build_supervised",
    "lightrft.app.cli",
    "torch.distributed.run",
    "runs",
)
SPARE_RANKS = 4
"""Number of ranks that a launcher keeps ready, also for restarts. It starts more as ordinary
processes.
"""
STARTS_WARM = "STARTS_WARM"
"""Environment variable: the path of the warm `python`, for a program that starts others by
sys.executable.
"""
NAMES = "python", "torchrun", "lightrft"
PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect({path!r})
request = json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd(), dict(os.environ)])
socket.send_fds(line, [request.encode()], [0, 1, 2])
program = int(line.recv(32))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(program, number))
code = os.waitstatus_to_exitcode(int(line.recv(32)))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@cache
def warm_programs(*, vllm: bool = False) -> str:
    """Return the folder with the programs.

    A fork that is made now serves them until this process ends. With `vllm` they have imported vLLM
    too. If a test has changed modules by now, they are changed there too.
    """
    if vllm:
        load_vllm()
    import_packages()
    for name in RUNS:
        import_module(name)
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(folder / "socket"))
    listening.listen(64)

    here, there = socket.socketpair()
    process = os.fork()
    if not process:
        here.close()
        _serve(listening, there)

    listening.close()
    there.close()
    atexit.register(lambda: (here.close(), os.waitpid(process, 0), shutil.rmtree(folder)))

    for name in NAMES:
        (folder / name).write_text(
            PROGRAM.format(python=sys.executable, path=str(folder / "socket"))
        )
        (folder / name).chmod(0o755)

    return str(folder)


def warm_python(*, vllm: bool = False) -> str:
    """Return the path of an interpreter for commands that would use sys.executable."""
    return f"{warm_programs(vllm=vllm)}/python"


def warm_environment(**variables: str) -> dict[str, str]:
    """Return the environment of this process with the programs first in PATH, and further
    variables.
    """
    return os.environ | {"PATH": f"{warm_programs()}:{os.environ['PATH']}"} | variables


# -- in the process that forks


def _serve(listening: socket.socket, owner: socket.socket) -> None:
    """Start what the programs request, until the process of the tests ends."""
    atexit._clear()  # what the tests have to clean up
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    serve(listening, owner, _attend)


def _attend(line: socket.socket) -> None:
    """Fork one program and say how it ended; kill it when its owner has ended."""
    try:
        request, files, *_ = socket.recv_fds(line, 2**20, 3)
        program = os.fork()
        if not program:
            line.close()
            _become(*json.loads(request), files)

        for file in files:
            os.close(file)
        line.send(str(program).encode())
        ended = os.pidfd_open(program)
        if ended not in select.select([ended, line], [], [])[0]:
            os.kill(program, signal.SIGKILL)
        status = os.waitpid(program, 0)[1]
        line.send(str(status).encode())
    finally:
        os._exit(0)


# -- in the fork


def _become(
    name: str, arguments: list[str], folder: str, environment: dict[str, str], files: list[int]
) -> None:
    """Be this program until it ends."""
    code = 1
    try:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)

        os.chdir(folder)
        _renew(environment)
        if own := os.environ.pop(STARTS_WARM, None):
            sys.executable = own
        code = _exit_code(name, arguments)
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _renew(environment: dict[str, str]) -> None:
    """Take over an environment, without what the tests have changed in this interpreter."""
    os.environ.clear()
    os.environ.update(environment)
    # An environment that lies over another one has the packages of both.
    own = [
        folder
        for folder in sys.path
        if folder.startswith((sys.prefix, sys.base_prefix)) or folder.endswith("site-packages")
    ]
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *own]
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    warnings.simplefilter("ignore")
    logging.getLogger().handlers.clear()

    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                # setStream() would flush the other one, which may be closed
                handler.stream = sys.stderr

    for name in [name for name in sys.modules if f"{name}.".startswith("lightrft.app.cli.")]:
        del sys.modules[name]  # its import says who has started this process
    tempfile.tempdir = None  # which TMPDIR may name
    random.seed()


def _exit_code(name: str, arguments: list[str]) -> int:
    try:
        _run(name, arguments)
        return 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


def _run(name: str, arguments: list[str]) -> None:
    """Run what `name arguments` runs."""
    if name != "python":
        arguments = ["-m", {"torchrun": "torch.distributed.run"}.get(name, name), *arguments]
    while arguments[0] in ("-u", "-W"):
        arguments = arguments[2 if arguments[0] == "-W" else 1 :]

    what, *rest = arguments
    if what == "-m" and rest[0] == "torch.distributed.run":
        _keep_ranks()
        # Several times in each heartbeat it searches all modules for the source of all frames, of
        # which a launcher has few.
        import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous").get_method_name = (
            lambda depth=2: "unknown"
        )

    if what in ("-m", "-c"):
        sys.path.insert(0, os.getcwd())
        sys.argv = [what, *rest[1:]]
    else:
        sys.path.insert(0, str(Path(what).resolve().parent))
        sys.argv = [what, *rest]

    if what == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    else:
        runpy.run_path(what, run_name="__main__")


# -- ranks of a launcher


def _keep_ranks() -> None:
    """Fork processes for ranks before there are threads; the launcher then starts these."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
        SubprocessHandler,
    )

    start = SubprocessHandler._popen
    kept = [_spare() for _ in range(SPARE_RANKS)]

    def popen(
        handler: SubprocessHandler, args: tuple[str, ...], environment: dict[str, str]
    ) -> "_Rank | subprocess.Popen":
        own_output = handler._stdout or handler._stderr
        return (
            _Rank(*kept.pop(), args, environment)
            if kept and not own_output
            else start(handler, args, environment)
        )

    SubprocessHandler._popen = popen


def _spare() -> tuple[int, socket.socket]:
    """Return a process that waits for its program, and the line to it; it ends with that line."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = os.fork()
    if not process:
        here.close()
        if request := there.recv(2**20):
            there.close()
            (_, *arguments), environment = pickle.loads(request)
            _become("python", arguments, os.getcwd(), environment, [])
        os._exit(0)

    there.close()
    return process, here


class _Rank:
    """A rank with what a launcher uses of subprocess.Popen."""

    def __init__(
        self, process: int, line: socket.socket, args: tuple[str, ...], environment: dict[str, str]
    ):
        self.pid = process
        self.returncode = None
        line.send(pickle.dumps((args, environment)))

    def poll(self) -> int | None:
        if self.returncode is None:
            process, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if process else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)
        return self.returncode
