"""What a warm program starts ends, writes and dies like what an interpreter starts."""

import gc
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from warm import warm_environment, warm_programs, warm_python

PROGRAMS = {
    "print(sys.argv[1:], os.getcwd(), sorted(os.environ), tempfile.gettempdir(), __name__, sys.stdin.read())": (
        "to be read"
    ),
    "sys.exit('no')": "",
    "sys.exit(7)": "",
    "os.kill(os.getpid(), 9)": "",
}
RANKS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(ranks)
os.write(1, f"{int(ranks)} {os.getppid()}\\n".encode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_ends_as_under_an_interpreter(tmp_path, program):
    def ended(python: str) -> tuple[int, str, str]:
        command = [python, "-c", f"import os, sys, tempfile; {program}", "a", "b c"]
        ran = subprocess.run(
            command,
            cwd=tmp_path,
            env={"LC_CTYPE": "C.UTF-8", "TMPDIR": str(tmp_path)},
            input=PROGRAMS[program],
            capture_output=True,
            text=True,
        )
        return ran.returncode, ran.stdout, ran.stderr

    assert ended(warm_python()) == ended(sys.executable)


@pytest.mark.slow
def test_signals_reach_a_program_which_ends_with_who_started_it():
    waits = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(100)"
    for number in (signal.SIGTERM, signal.SIGKILL):
        started = subprocess.Popen([warm_python(), "-c", waits], stdout=subprocess.PIPE)
        program = psutil.Process(int(started.stdout.readline()))
        started.send_signal(number)
        assert started.wait(20) == -number
        deadline = time.monotonic() + 20
        while program.is_running() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not program.is_running()


@pytest.mark.slow
def test_ranks_are_children_of_their_launcher(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    command = ["bash", "-c", "torchrun --standalone --nproc-per-node 2 ranks.py"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=warm_environment(), capture_output=True, text=True
    )
    found = [line.split() for line in ran.stdout.splitlines()]
    assert ran.returncode == 0 and [total for total, _ in found] == ["3", "3"], ran.stderr
    assert len({launcher for _, launcher in found}) == 1


class Group:
    """Like a process group of gloo, which waits for threads that a fork does not have."""

    def __init__(self, marker: Path):
        self.marker = marker
        self.cycle = self

    def __del__(self) -> None:
        if self.marker.parent.exists():
            self.marker.touch()


def test_what_the_parent_has_left_is_never_collected(tmp_path: Path) -> None:
    """vLLM thaws and collects all objects when an engine ends."""
    warm_python()  # imports first, because they make objects that are collected
    gc.disable()
    try:
        Group(tmp_path / "collected")
        python = Path(warm_programs.__wrapped__(), "python")
    finally:
        gc.enable()
    assert not (tmp_path / "collected").exists()
    subprocess.run([python, "-c", "import gc; gc.unfreeze(); gc.collect()"], check=True, timeout=60)
    assert not (tmp_path / "collected").exists()


def _collect() -> None:
    gc.unfreeze()
    gc.collect()


def test_what_the_parent_has_left_is_collected_in_no_fork(tmp_path: Path) -> None:
    """A fork that collected it waited forever for threads of the parent."""
    gc.disable()
    try:
        Group(tmp_path / "collected")
        process = multiprocessing.get_context("fork").Process(target=_collect)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert not (tmp_path / "collected").exists()
    finally:
        gc.enable()
