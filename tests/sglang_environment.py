"""Call a function in the environment that has SGLang.

It lies over the tests' own environment, beside its folder. SGLang's import takes longer than most
of what is tested, so one process imports it for all tests, also for other workers, and is forked
for each call.
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
from typing import Any

from fork_server import serve

ROOT = Path(__file__).resolve().parent.parent
PREFIX = Path(f"{sys.prefix}-sglang")
SEARCHED = os.pathsep.join(map(str, [ROOT / "tests" / "sglang_stand_ins", ROOT, ROOT / "tests"]))


def in_sglang_environment(
    function: Callable[..., Any], *args: Any, timeout: float = 600, spawns: bool = False
) -> Any:
    """Run `function(*args)` in a fork of a process of that environment.

    That process has imported SGLang; ranks are forked from there. SGLang's own processes are forked
    from it too (spares.py), or with `spawns` started afresh, as they are for users. The function,
    its arguments and its result travel by pickle, so it must live in a module that can be imported.
    What it raises, a dead process, the time limit (seconds) or a call of the stand-in for SGLang's
    kernels raise RuntimeError here.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            name: Path(folder) / name for name in ("call", "answer", "output", "stand_in_calls")
        }
        environment = os.environ | {
            "STAND_IN_CALLS": str(paths["stand_in_calls"]),
            "PYTHONPATH": SEARCHED,
        }
        paths["call"].write_bytes(
            pickle.dumps((environment, spawns, pickle.dumps((function, args))))
        )

        ended = _call(folder, timeout)
        said = paths["output"].read_text(errors="replace")[-20_000:]
        if not paths["answer"].exists():
            raise RuntimeError(
                f"{function} ended with {ended} within {timeout} s and said:\n{said}"
            )

        result, error = pickle.loads(paths["answer"].read_bytes())
        if error:
            raise RuntimeError(f"{said}\n{error}")
        if paths["stand_in_calls"].exists():
            raise RuntimeError(
                "the stand-in for SGLang's kernels was called:"
                f" {paths['stand_in_calls'].read_text()}"
            )

        return result


def beside_torchvision(function: Callable[..., Any], *args: Any, timeout: float = 600) -> Any:
    """Run `function(*args)` in a new process of that environment.

    It has torchvision and vLLM instead of SGLang.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"WITH_VLLM": "1", "PYTHONPATH": SEARCHED}
        (Path(folder) / "call").write_bytes(
            pickle.dumps((environment, True, pickle.dumps((function, args))))
        )
        subprocess.run(
            [PREFIX / "bin" / "python", "-W", "ignore", __file__, folder],
            cwd=ROOT,
            env=environment,
            timeout=timeout,
        )
        answer = Path(folder) / "answer"
        said = (Path(folder) / "output").read_text(errors="replace")[-20_000:]

        result, error = (
            pickle.loads(answer.read_bytes())
            if answer.exists()
            else (None, "it ended without an answer")
        )
        if error:
            raise RuntimeError(f"{said}\n{error}")
        return result


def _call(folder: str, timeout: float) -> str:
    """Return how the fork ended that answers in this folder; nothing of it is left."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(_host())
        line.settimeout(timeout)
        line.send(folder.encode())
        try:
            return line.recv(32).decode()
        except TimeoutError:
            line.shutdown(socket.SHUT_WR)
            line.settimeout(None)
            line.recv(32)
            return "nothing"


@cache
def _host() -> str:
    """Return the address of the process that has imported SGLang.

    The first test that wants it starts it, and it ends with the whole test run.
    """
    folder = Path(os.environ["TEST_RUN"])
    address = folder / "sglang"
    said = folder / "sglang.output"
    with open(folder / "sglang.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            python = PREFIX / "bin" / "python"
            if not python.exists():
                raise RuntimeError(
                    f"no environment with SGLang at {PREFIX}: make it with `bash"
                    " scripts/environment.sh test`"
                )

            # Otherwise a C++ compiler takes half a minute for the mask of a divided embedding.
            eager = {"TORCH_COMPILE_DISABLE": "1"}
            command = [python, "-W", "ignore", __file__, address, os.environ["TEST_RUN_PROCESS"]]
            with open(said, "w") as output:
                host = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": SEARCHED} | eager,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,
                )

            # Libraries may print at their import.
            if b"ready\n" not in iter(host.stdout.readline, b""):
                raise RuntimeError(f"SGLang cannot be imported:\n{said.read_text()}")

    return str(address)


def _serve(address: str, owner: int) -> None:
    """Fork a process for each line until the process `owner` has ended."""
    import lightrft.engine.sglang  # noqa: F401  before all of SGLang, as it sets its environment

    logging.disable()  # many models need what is not here
    importlib.import_module("sglang.srt.models.registry").ModelRegistry._load_default_models()
    logging.disable(logging.NOTSET)
    for name in ("runs", "engine.contract"):  # which most calls would import
        importlib.import_module(name)
    importlib.import_module("ranks").import_packages()
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
    _serve(sys.argv[1], int(sys.argv[2])) if sys.argv[2:] else _answer(Path(sys.argv[1]))
