"""Sandbox for programs that responses contain. Each program is a process of its own.

It has no network, an empty environment, an empty folder, and limits of time, memory, processes and
file size; inside.py sets and watches these. Of the machine it sees no processes, no settings of the
kernel, and no files but the system's and Python's, and these it can only read. bubblewrap does
this, or, without it, namespaces of the kernel (unshare, mount). A program of a run of root has
another user's rights.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import IO, Any

from lightrft.rewards.verifiers.asserts import Asserts

RUN_SECONDS = 10
"""Time limit of each run."""
MEMORY_BYTES = 1 << 30
"""Number of bytes of all processes together, and of the address space of each."""
PROCESSES = 64
FILE_SIZE = 16 << 20
"""Largest size of a file in bytes, also of the output."""
DISK_SIZE = 4 * FILE_SIZE
"""Size of each of the two folders in memory that a program can write."""
WITHOUT_SANDBOX = "LIGHTRFT_CODE_SANDBOX"
"""Environment variable that permits runs without a sandbox, by the value `none`."""
FIRST_USER_ID = 1 << 30
"""User ids above it belong to nobody.

A program of root's run has one of them, also because limits of processes count by user.
"""
REFUSED = 86
"""Exit code of tests that cannot be judged, whatever the program is."""
UNJUDGED = 87
"""Exit code of tests that cannot judge this program, as it gives them an object."""
INSIDE = Path(__file__).with_name("inside.py")
NEW_ROOT = Path(__file__).with_name("new_root.sh")
"""Script that runs a command where only some folders can be read."""


class UnjudgedError(Exception):
    """Raised for a program that tests cannot judge, because objects of its own would decide."""


@cache
def find_sandbox() -> tuple[str, ...]:
    """Return the command that begins a run, after it has run once.

    Raises ValueError if none of the known ones works.
    """
    if os.environ.get(WITHOUT_SANDBOX) == "none":
        return ()
    for sandbox in (_bubblewrap(), _unshare(by_root=True), _unshare(by_root=False)):
        if sandbox and _works(sandbox):
            return sandbox
    raise ValueError(
        "code needs a sandbox, and neither bubblewrap nor unshare works on this machine: install "
        "bubblewrap (apt install bubblewrap) where user namespaces are permitted, or set "
        f"{WITHOUT_SANDBOX}=none to run the programs of responses with your rights and network"
    )


@contextmanager
def running(
    what: str, job: Any, *, connection: socket.socket | None = None, **streams: Any
) -> Iterator[subprocess.Popen]:
    """Run a program in the sandbox, and kill it at the end of the context.

    `what` is `program`, a `module` that is asked over the connection, or the `tests` that ask.
    Further options are the streams of subprocess.Popen. Raises ValueError if the machine has no
    sandbox.
    """
    sandbox = find_sandbox()
    with (
        _file(json.dumps(job)) as source,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        settings = {
            "what": what,
            "job": source.fileno(),
            "socket": connection.fileno() if connection else -1,
            "seconds": RUN_SECONDS,
            "memory": MEMORY_BYTES,
            "processes": PROCESSES,
            "file_size": FILE_SIZE,
            "refused": REFUSED,
            "unjudged": UNJUDGED,
        }
        # The job comes over a descriptor: arguments would be in /proc for all to read.
        passed = [number for number in (settings["job"], settings["socket"]) if number >= 0]
        unbuffered = ["-u"] if streams.get("stderr") == subprocess.STDOUT else []
        command = [*sandbox, *_python(*unbuffered, "-c", INSIDE.read_text(), json.dumps(settings))]

        process = subprocess.Popen(command, env={}, cwd=folder, pass_fds=passed, **streams)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def output_of(
    program: str, stdin: str = "", *, errors: int = subprocess.DEVNULL
) -> tuple[int, str]:
    """Run a program; return the exit code and the standard output.

    The code is not 0 if the program fails or takes too long.
    """
    with _file(stdin) as standard_input, tempfile.TemporaryFile() as output:
        os.fchmod(output.fileno(), 0o222)
        with running(
            "program", program, stdin=standard_input, stdout=output, stderr=errors
        ) as process:
            code = process.wait()
        output.seek(0)
        return code, output.read(FILE_SIZE).decode(errors="replace")


def passes(program: str, tests: Asserts) -> bool:
    """Return True if a program passes all tests; these run in another sandbox.

    Raises ValueError if the tests pass the program what cannot be sent to it, and UnjudgedError if
    they fail after the program gave them what cannot be sent.
    """
    of_program, of_tests = socket.socketpair()
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with (
        of_program,
        of_tests,
        tempfile.TemporaryFile() as reason,
        running("module", program, connection=of_program, **silent),
    ):
        of_program.close()
        with running(
            "tests", asdict(tests), connection=of_tests, **silent | {"stderr": reason}
        ) as process:
            of_tests.close()
            code = process.wait()

        if code in (REFUSED, UNJUDGED):
            reason.seek(0)
            kind = ValueError if code == REFUSED else UnjudgedError
            raise kind(reason.read().decode(errors="replace"))
        return code == 0


def _bubblewrap() -> tuple[str, ...]:
    if not (path := shutil.which("bwrap")):
        return ()
    alone = "--unshare-all --as-pid-1 --die-with-parent --new-session --cap-drop ALL --clearenv"
    disk = f"--size {DISK_SIZE} --tmpfs"
    devices = f"--dev /dev {disk} /dev/shm --remount-ro /dev {disk} /tmp"
    binds = [option for folder in _folders() for option in ("--ro-bind-try", folder, folder)]
    # The root is made read-only last, after everything has its place in it.
    last = "--remount-ro / --chdir /tmp"
    proc = ["--proc", "/proc", *_hidden_settings()]
    return (*_as_nobody(), path, *alone.split(), *proc, *devices.split(), *binds, *last.split())


def _unshare(*, by_root: bool) -> tuple[str, ...]:
    """Return the command that makes namespaces.

    With `by_root` root mounts; otherwise a user does who is root only inside.
    """
    path = shutil.which("unshare")
    nobody = _as_nobody()
    if not path or by_root and not nobody:
        return ()
    spaces = ("--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child")
    root = ("sh", "-c", NEW_ROOT.read_text(), str(DISK_SIZE), *_folders(), "--")
    if by_root:
        return (path, *spaces, *root, *nobody)
    powerless = (path, "--user", "--map-user=65534", "--map-group=65534", "--")
    return (*nobody, path, "--user", "--map-root-user", *spaces, *root, *powerless)


def _as_nobody() -> tuple[str, ...]:
    """Return the start of a command that runs with the rights of nobody.

    It is empty unless this process is root on the machine itself.
    """
    if os.geteuid() != 0 or Path("/proc/self/uid_map").read_text().split()[:2] != ["0", "0"]:
        return ()

    # A number of its own for each process, so that no run can signal another one.
    user = FIRST_USER_ID + os.getpid()
    rights = "--clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs --pdeathsig=KILL"
    setpriv = shutil.which("setpriv") or "setpriv"
    return (setpriv, f"--reuid={user}", f"--regid={user}", *rights.split(), "--")


def _hidden_settings() -> list[str]:
    """Return the options that hide files of /proc.

    These are folders that are not about processes, and whatever else can be written there.
    """
    hidden: list[str] = []
    for entry in sorted(Path("/proc").iterdir()):
        if entry.name.isdigit() or entry.is_symlink():
            continue
        if entry.is_dir():
            hidden += ["--tmpfs", str(entry), "--remount-ro", str(entry)]
        elif entry.stat().st_mode & 0o222:
            hidden += ["--ro-bind", "/dev/null", str(entry)]
    return hidden


def _folders() -> list[str]:
    """Return the folders of the system and of Python that a program may read."""
    of_python = sysconfig.get_config_var("prefix"), str(_interpreter().parent.parent)
    names = ("/usr", "/bin", "/lib", "/lib64", *of_python)
    return [
        name
        for name in dict.fromkeys(names)
        if not any(Path(other) in Path(name).parents for other in names)
    ]


def _works(sandbox: tuple[str, ...]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        command = [*sandbox, *_python("-c", "")]
        return subprocess.run(command, env={}, cwd=folder, capture_output=True).returncode == 0


def _python(*arguments: str) -> list[str]:
    return [str(_interpreter()), "-I", "-S", *arguments]


def _interpreter() -> Path:
    """Return the interpreter outside of a virtual environment."""
    return Path(sys.executable).resolve()


def _file(content: str) -> IO[bytes]:
    file = tempfile.TemporaryFile()
    os.fchmod(file.fileno(), 0o444)  # another user may open it again, as /dev/stdin
    file.write(content.encode(errors="surrogatepass"))
    file.seek(0)
    return file
