"""What a program in a response can write, use and pretend, in each kind of sandbox."""

import json
import os
import shutil
import socket
import subprocess
import time

import pytest

from lightrft.rewards.verifiers import sandbox
from lightrft.rewards.verifiers.asserts import read_asserts
from lightrft.rewards.verifiers.sandbox import output_of, passes


@pytest.fixture(scope="module", params=["bwrap", "unshare"], autouse=True)
def kind(request):
    """Run in each kind of sandbox."""
    found = shutil.which
    (other,) = {"bwrap", "unshare"} - {request.param}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(sandbox.WITHOUT_SANDBOX, raising=False)
        patch.setattr(sandbox.shutil, "which", lambda name: None if name == other else found(name))
        patch.setattr(sandbox, "RUN_SECONDS", 6)
        patch.setattr(sandbox, "MEMORY_BYTES", 400 << 20)
        sandbox.find_sandbox.cache_clear()
        try:
            sandbox.find_sandbox()
        except ValueError:
            pytest.skip(f"{request.param} does not work here")
        yield request.param
        sandbox.find_sandbox.cache_clear()


# -- what it can write


WRITABLE = """
import json, os, re
found = []
for top in ("/proc", "/sys"):
    for folder, _, files in os.walk(top):
        if re.match(r"/proc/\\d+", folder):
            continue  # of a process of the sandbox
        for name in files:
            try:
                os.close(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_NONBLOCK))
                found.append(os.path.join(folder, name))
            except OSError:
                pass
print(json.dumps(found))
"""


def test_nothing_of_the_kernel_opens_for_writing():
    code, output = output_of(WRITABLE, errors=subprocess.STDOUT)
    assert (code, json.loads(output)) == (0, [])


def test_a_sandbox_that_its_user_makes_hides_as_much(kind):
    if (
        kind == "bwrap"
        or not (command := sandbox._unshare(by_root=False))
        or not sandbox._works(command)
    ):
        pytest.skip("it is that of every user")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "find_sandbox", lambda: command)
        assert output_of(WRITABLE, errors=subprocess.STDOUT) == (0, "[]\n")
        assert passes("def f(x): return x", read_asserts(["assert f(2) == 2"]))
        assert output_of("import os; os.mkdir('/new')")[0] != 0


def test_a_program_is_not_root_and_has_no_capabilities():
    status = (
        "print([l.split()[1:] for l in open('/proc/self/status') if "
        "l.startswith(('CapEff', 'CapBnd', 'NoNewPrivs'))])"
    )
    assert output_of(status)[1].strip() == "[['0000000000000000'], ['0000000000000000'], ['1']]"

    if os.getuid() == 0:
        seen = []
        with sandbox.running("program", "import time; time.sleep(60)") as process:
            deadline = time.monotonic() + 20
            while not seen and time.monotonic() < deadline:
                seen = [uid for uid in _users_below(process.pid) if uid >= sandbox.FIRST_USER_ID]
        assert seen


def _users_below(process: int) -> list[int]:
    import psutil

    users = []
    for child in psutil.Process(process).children(recursive=True):
        try:
            users.append(child.uids().real)
        except psutil.NoSuchProcess:
            continue
    return users


FOLDERS = """
import os
for folder in ("/", "/tmp", "/dev", "/dev/shm", "/usr", "/proc", "/proc/sys"):
    try:
        os.mkdir(folder + "/new")
        print(folder)
    except OSError:
        pass
"""


def test_two_folders_can_be_written():
    assert output_of(FOLDERS)[1].split() == ["/tmp", "/dev/shm"]


def test_standard_streams_have_their_usual_names():
    assert output_of("print(open('/dev/stdin').read(), file=open('/dev/stdout', 'w'))", "4 5") == (
        0,
        "4 5\n",
    )


# -- what it can use


HOARDS = {
    "memfds": (
        "for i in range(100): f = os.memfd_create('x'); os.truncate(f, 16 << 20); "
        "keep.append(mmap(f, 16 << 20))"
    ),
    "shared memory": (
        "\nfor i in range(100):\n  n = libc.shmget(0, 16 << 20, 0o1600)\n"
        "  assert n >= 0\n  libc.shmat(n, 0, 0)"
    ),
    "/dev/shm": "\nfor i in range(30): open(f'/dev/shm/{i}', 'wb').write(b'1' * (15 << 20))",
    "/tmp": "\nfor i in range(30): open(f'/tmp/{i}', 'wb').write(b'1' * (15 << 20))",
    "/dev": "\nfor i in range(30): open(f'/dev/{i}', 'wb').write(b'1' * (15 << 20))",
    "a new file system": "assert libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, b'') == 0",
    "processes": "\nfor i in range(1000): os.fork() or time.sleep(100)",
    "memory of several processes": (
        "\nfor i in range(6):\n"
        "  if os.fork() == 0: x = b'1' * (150 << 20); time.sleep(100)\ntime.sleep(2)"
    ),
    "memory of processes in sessions of their own": (
        "\nfor i in range(6):\n"
        "  if os.fork() == 0: os.setsid(); x = b'1' * (150 << 20); time.sleep(100)\n"
        "time.sleep(2)"
    ),
    "buffers of sockets": (
        "\nimport socket\nfor i in range(60):\n  if os.fork() == 0:\n"
        "    for j in range(29): keep += socket.socketpair(); keep[-1].setblocking(0)\n"
        "    for s in keep:\n"
        "      try:\n        while True: s.send(b'1' * 4096)\n      except OSError: pass\n"
        "    time.sleep(100)\ntime.sleep(4)"
    ),
    "larger buffers": (
        "\nimport socket\na, b = socket.socketpair()\n"
        "a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)"
    ),
    "asynchronous input": (
        "\nassert libc.syscall({'x86_64': 206, 'aarch64': 0}[os.uname().machine], 1024, "
        "ctypes.byref(ctypes.c_ulong())) == 0"
    ),
    "the watcher": "\nos.kill(1, 9); os.kill(1, 19); time.sleep(.2); open('/proc/1/mem', 'r+b')",
}


@pytest.mark.parametrize("case", HOARDS)
def test_memory_and_processes_are_bounded_together(case):
    names = "import ctypes, os, time\nfrom mmap import mmap\nkeep, libc = [], ctypes.CDLL(None)"
    code, output = output_of(f"{names}\n{HOARDS[case]}\nprint('done')")
    assert code != 0 and "done" not in output


def test_only_sockets_of_the_sandbox_can_be_made():
    program = """
import socket
for family in range(64):
    for kind in (1, 2, 3, 5):
        try: socket.socket(family, kind); print(family)
        except OSError: pass
"""
    code, output = output_of(program, errors=subprocess.STDOUT)
    assert (code, set(output.split())) == (0, {str(int(socket.AF_UNIX))})


def test_what_a_right_program_needs_is_not_denied():
    program = """
import os, multiprocessing, threading, tempfile
from concurrent.futures import ThreadPoolExecutor
x = b'1' * (100 << 20)
for i in range(5):                      # the pages of forks are shared
    if os.fork() == 0: os._exit(sum(x[:100]) != 4900)
    assert os.wait()[1] == 0
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]
with ThreadPoolExecutor(4) as threads: assert list(threads.map(abs, [-1, 2])) == [1, 2]
with tempfile.TemporaryFile() as file: file.write(b'1' * (1 << 20))
import asyncio, time
assert asyncio.run(asyncio.sleep(0, 3)) == 3
threads = [threading.Thread(target=time.sleep, args=(.5,)) for _ in range(25)]
for each in threads: each.start()
for each in threads: each.join()
with context.Manager() as manager: assert list(manager.list([1])) == [1]
print('done')
"""
    assert output_of(program, errors=subprocess.STDOUT) == (0, "done\n")
