"""Tests of programs that responses contain, each run in a process of its own inside a sandbox.

A run has no network, an empty environment, an empty folder, and limits of time, memory, processes and file size. Of the machine
it sees no processes, and no files but those of the system and of Python, which it can only read. bubblewrap does this, or,
without it, namespaces of the kernel (unshare, mount), where the limit of processes does not hold for root.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import IO, Any

from lightrft.rewards.labels import reads
from lightrft.samples import Sample

SECONDS = 10
"""Time limit of each run."""
MEMORY = 1 << 30
"""Number of bytes of address space of each process."""
PROCESSES = 64
FILE_SIZE = 16 << 20
"""Largest size of a file in bytes, also of the output."""
WITHOUT_SANDBOX = "LIGHTRFT_CODE_SANDBOX"
"""Environment variable that permits runs without a sandbox, by the value `none`."""
BLOCK = re.compile(r"^[ \t]*```(?:python|py)[ \t]*\r?\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE)
HARNESS = f"""
import builtins, json, os, resource, sys, types
for name, limit in [("AS", {MEMORY}), ("CPU", {SECONDS}), ("NPROC", {PROCESSES}), ("FSIZE", {FILE_SIZE}), ("CORE", 0)]:
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
def run():
    with os.fdopen(int(sys.argv.pop())) as file:
        job = json.load(file)
    sys.argv[:] = ["program.py"]
    builtins.exit = builtins.quit = sys.exit
    sys.modules[job["name"]] = module = types.ModuleType(job["name"])
    scope = module.__dict__
    exec(compile(job["program"], "program.py", "exec"), scope)
    if job["tests"] is not None:
        for number, test in enumerate(job["tests"]):
            exec(compile(test, f"test {{number}}", "exec"), scope)
        os.write(1, job["nonce"].encode())
        os._exit(0)
run()
"""
"""Program that sets the limits, then runs the one of the response. It writes the nonce if all asserts have passed: a program
that exits before them cannot, and passes none."""
NEW_ROOT = """
set -e
PATH=/usr/sbin:/usr/bin:/sbin:/bin
root=$(pwd -P)
mount -t tmpfs -o "size=$0,mode=755" tmpfs "$root"
cd "$root"
while [ "$1" != -- ]; do
    if [ -L "$1" ]; then
        cp -P "$1" ".$1"
    elif [ -d "$1" ]; then
        mkdir -p ".$1"
        mount --rbind "$1" ".$1"
    fi
    shift
done
shift
while read -r _ _ _ _ place options _; do
    place=$(printf %b "$place")
    case $place in "$root"/*) mount -o "remount,bind,ro${options#r[ow]}" "$place" ;; esac
done </proc/self/mountinfo
mkdir old proc dev tmp
mount -t proc proc proc 2>/dev/null || :
for device in null zero random urandom; do
    : >"dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
mount -t tmpfs -o "size=$0,mode=1777" tmpfs tmp
pivot_root . old
umount -l /old
rmdir /old
mount -o remount,bind,ro /
cd /tmp
unset OLDPWD
exec unshare --user --map-user=65534 --map-group=65534 -- "$@"
"""
"""Script of an unshared shell in an empty folder: run the command of its arguments where only the folders before it can be read.

Its further arguments are the size of /tmp in bytes, the folders and `--`. The second user namespace ends the right to mount.
"""


def _parse_tests(tests: Any) -> Any:
    """Return the tests as a list of asserts, or as a dictionary with inputs and outputs."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [tests]
    if isinstance(tests, list) and tests and all(isinstance(one, str) for one in tests):
        return tests
    if isinstance(tests, dict):
        inputs, expected = tests.get("inputs"), tests.get("outputs")
        if isinstance(inputs, list) and isinstance(expected, list) and 0 < len(inputs) == len(expected):
            return tests
    forms = 'a list of asserts nor {"inputs": [...], "outputs": [...]} of equal length'
    raise ValueError(f"the column tests has {tests!r:.200}, which is neither {forms}")


@reads(tests=_parse_tests)
def passes_tests(samples: list[Sample], tests: list[Any], **_: Any) -> list[float]:
    """Return 1 if the last ```python block of the response, or the whole response, passes all tests, else 0.

    The column `tests` has a list of asserts as texts, or {"inputs": [...], "outputs": [...]} with texts for standard input and
    the output that is expected, which are compared without whitespace at the ends of lines; either may be JSON text. Raises
    ValueError for other tests, or if the machine has no sandbox.
    """
    sandbox = find_sandbox()
    return [float(_passes(_program(sample.text), _parse_tests(one), sandbox)) for sample, one in zip(samples, tests, strict=True)]


def output_of(program: str) -> str:
    """Run a program in the sandbox; return what it writes to its standard output and its standard error.

    Raises ValueError if the machine has no sandbox.
    """
    job = {"program": program, "name": "__main__", "tests": None}
    code, output = _run(job, "", find_sandbox(), errors=subprocess.STDOUT)
    return output if code == 0 or output else f"the program has ended with exit code {code}: is it out of time or memory?"


@cache
def find_sandbox() -> tuple[str, ...]:
    """Return the command that begins a run, after it has run once. Raises ValueError if none of the known ones works."""
    clock = (shutil.which("timeout") or "timeout", "--signal=KILL", str(SECONDS))
    if os.environ.get(WITHOUT_SANDBOX) == "none":
        return clock
    for sandbox in (_bubblewrap(), _unshare()):
        if sandbox and _works((*clock, *sandbox)):
            return (*clock, *sandbox)
    raise ValueError(
        "code needs a sandbox, and neither bubblewrap nor unshare works on this machine: install bubblewrap (apt install "
        f"bubblewrap) where user namespaces are permitted, or set {WITHOUT_SANDBOX}=none to run the programs of responses with "
        "your rights and network"
    )


def _bubblewrap() -> tuple[str, ...]:
    if not (path := shutil.which("bwrap")):
        return ()
    binds = [part for folder in _folders() for part in ("--ro-bind-try", folder, folder)]
    alone = ("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv")
    return (path, *alone, "--proc", "/proc", "--dev", "/dev", "--size", str(4 * FILE_SIZE), "--tmpfs", "/tmp", *binds,
            "--chdir", "/tmp")  # fmt: skip


def _unshare() -> tuple[str, ...]:
    if not (path := shutil.which("unshare")):
        return ()
    spaces = ("--user", "--map-root-user", "--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child")
    return (path, *spaces, "sh", "-c", NEW_ROOT, str(4 * FILE_SIZE), *_folders(), "--")


def _folders() -> list[str]:
    """Return the folders that a program may read: those of the system and of Python."""
    names = ("/usr", "/bin", "/lib", "/lib64", sysconfig.get_config_var("prefix"), str(_python().parent.parent))
    return [name for name in dict.fromkeys(names) if not any(Path(other) in Path(name).parents for other in names)]


def _works(sandbox: tuple[str, ...]) -> bool:
    command = [*sandbox, str(_python()), "-I", "-S", "-c", ""]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(command, env={}, cwd=folder, capture_output=True).returncode == 0


def _python() -> Path:
    """Return the interpreter outside of a virtual environment."""
    return Path(sys.executable).resolve()


def _program(text: str) -> str:
    blocks = BLOCK.findall(text)
    return blocks[-1] if blocks else text


def _passes(program: str, tests: Any, sandbox: tuple[str, ...]) -> bool:
    if isinstance(tests, list):
        nonce = secrets.token_hex(16)
        code, output = _run({"program": program, "name": "program", "tests": tests, "nonce": nonce}, "", sandbox)
        return code == 0 and output.endswith(nonce)
    job = {"program": program, "name": "__main__", "tests": None}
    pairs = zip(tests["inputs"], tests["outputs"], strict=True)
    runs = ((_run(job, str(stdin), sandbox), str(expected)) for stdin, expected in pairs)
    return all(code == 0 and _lines(output) == _lines(expected) for (code, output), expected in runs)


def _run(job: dict[str, Any], stdin: str, sandbox: tuple[str, ...], *, errors: int = subprocess.DEVNULL) -> tuple[int, str]:
    """Return the exit code of a run, which is not 0 if it fails or takes too long, and what it writes to its standard output."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        _file(json.dumps(job)) as source,
        _file(stdin) as standard_input,
        tempfile.TemporaryFile() as output,
    ):
        unbuffered = ["-u"] if errors == subprocess.STDOUT else []
        command = [*sandbox, str(_python()), *unbuffered, "-I", "-S", "-c", HARNESS, str(source.fileno())]
        done = subprocess.run(
            command, stdin=standard_input, stdout=output, stderr=errors, env={}, cwd=folder,
            pass_fds=[source.fileno()],
        )  # fmt: skip
        output.seek(0)
        return done.returncode, output.read(FILE_SIZE).decode(errors="replace")


def _file(content: str) -> IO[bytes]:
    file = tempfile.TemporaryFile()
    file.write(content.encode(errors="surrogatepass"))
    file.seek(0)
    return file


def _lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().split("\n")]
