"""Signals while a run goes on: the first one asks it to stop, and the children of a reward are
ended by them as anywhere.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from lightrft.app.run.interruption import Interrupted, Interruption
from lightrft.models.parallel.collectives import Axis
from ranks import exit_codes

ALONE = Axis("world", 1, 0, None)


def with_children() -> None:
    """Start and end children in every usual way, until one of them does not end.

    They start from the main thread and from another.
    """
    fork = multiprocessing.get_context("fork")
    with Interruption(ALONE):
        for use in (end_pools, end_processes, end_programs):
            use(fork)
        thread = threading.Thread(target=end_processes, args=(fork,))
        thread.start()
        thread.join()
    os._exit(0)


def end_pools(fork) -> None:
    for _ in range(5):
        pool = fork.Pool(2)
        assert pool.map(abs, [-1, 2]) == [1, 2]
        pool.terminate()
        pool.join()


def end_processes(fork) -> None:
    """At once: the signal comes while the child begins."""
    for wait in [0.0, 0.0005, 0.002] * 6:
        child = fork.Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(wait)
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM


def end_programs(fork) -> None:
    for preparation in [None, os.getpid] * 4:
        program = subprocess.Popen(["sleep", "60"], preexec_fn=preparation)
        program.terminate()
        assert program.wait(20) == -signal.SIGTERM


@pytest.mark.slow
def test_children_of_a_reward_end_by_sigterm():
    assert exit_codes(1, with_children, timeout=60) == [0]


def child_of_a_terminal() -> None:
    """The first Ctrl-C reaches the run and its child, and both go on; the second ends the child."""
    # a shell starts what runs in its background with it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interruption(ALONE) as interruption:
        ear, mouth = os.pipe()
        child = os.fork()
        if child == 0:
            os.set_blocking(mouth, False)
            signal.set_wakeup_fd(mouth)  # it gets a byte for each signal
            os.write(mouth, b"ready")
            time.sleep(60)
            os._exit(7)

        assert os.read(ear, 5) == b"ready"
        for process in (os.getpid(), child):
            os.kill(process, signal.SIGINT)
        assert os.read(ear, 1) == bytes([signal.SIGINT])
        time.sleep(0.3)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        with pytest.raises(Interrupted):
            interruption.safe_point()
        os.kill(child, signal.SIGINT)
        assert os.waitpid(child, 0)[1] != 0

        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    os._exit(0)


def test_the_first_ctrl_c_only_asks():
    assert exit_codes(1, child_of_a_terminal, timeout=30) == [0]


def signal_during_a_fork() -> None:
    """A signal for the run itself is not lost by a fork."""
    with Interruption(ALONE) as interruption:
        killer = subprocess.Popen([sys.executable, "-c", f"import os; os.kill({os.getpid()}, 15)"])
        while killer.poll() is None:
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        with pytest.raises(Interrupted):
            interruption.safe_point()
    os._exit(0)


def test_a_signal_during_a_fork_is_not_lost():
    assert exit_codes(1, signal_during_a_fork, timeout=30) == [0]
