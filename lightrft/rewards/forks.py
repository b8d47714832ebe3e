"""Worker processes with a user's code: one process imports it once, and forks the workers.

The rank communicates with that process, and with each worker, over sockets. A killed worker is
replaced by a fork, without a second import. They start without the rank's memory, threads, sockets
and devices, and end with the rank in any case. Whatever a worker has started ends with it, also in
sessions of its own: each worker has a keeper, a process that inherits what it leaves. Linux only.
"""

import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Protocol

import psutil

LONGEST_PROBLEM = 2000
"""Number of characters of an error at the import that are reported."""
FORK = 0
"""Request for a worker; any other number is the process id of a worker that has ended."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LENGTH_HEADER = struct.Struct("!i")
"""Length of a message, as a multiprocessing.Connection writes it."""
LARGEST_MESSAGE = (1 << 31) - 1
STACK_SIGNAL = signal.SIGUSR1
"""Signal that makes a worker write a stack trace to the socket, which is useless afterwards."""


class WorkerSetup(Protocol):
    """Settings for the process that forks workers. They are pickled."""

    @property
    def memory(self) -> int:
        """Return the number of bytes that a worker may allocate; 0 for no limit."""

    def prepare(self) -> Callable[[Connection], None]:
        """Import the user's code; return the function that a worker runs with a socket."""


@dataclass(slots=True, eq=False)
class Worker:
    """A worker process, as the rank sees it."""

    process: int | None
    """Process id; None for a program in the process of the rank."""
    socket: Connection

    def kill(self) -> None:
        """Kill it and the processes that it started; the parent still gets the exit status."""
        self.socket.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)


class Mailbox:
    """The rank's end of a worker's socket. The rank never waits for it, whatever arrives."""

    def __init__(self, connection: Connection, *, longest: int = LARGEST_MESSAGE):
        """Take over the connection. A message of more than `longest` bytes is an error."""
        self.connection = connection
        self.longest = longest
        os.set_blocking(connection.fileno(), False)
        self._unread = bytearray()
        self._unsent = bytearray()

    @property
    def is_full(self) -> bool:
        """Return True if flush() has something left to send."""
        return bool(self._unsent)

    def send(self, content: bytes) -> None:
        """Send a message, now or when the worker reads. Raises OSError if the worker has ended."""
        self._unsent += LENGTH_HEADER.pack(len(content)) + content
        self.flush()

    def flush(self) -> None:
        """Send what the worker had no room for."""
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: os.write(self.connection.fileno(), self._unsent)]

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived completely, possibly none.

        Raises EOFError or OSError if the worker has ended, and ValueError for what is no message.
        """
        try:
            data = os.read(self.connection.fileno(), 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        self._unread += data

        # The size is checked before the content is there: a worker could announce any number.
        messages = []
        while len(self._unread) >= LENGTH_HEADER.size:
            (size,) = LENGTH_HEADER.unpack_from(self._unread)
            if not 0 <= size <= self.longest:
                raise ValueError(
                    f"it claims to have {size} bytes, but at most {self.longest} are possible"
                )
            if len(self._unread) < LENGTH_HEADER.size + size:
                break
            messages.append(bytes(self._unread[LENGTH_HEADER.size : LENGTH_HEADER.size + size]))
            del self._unread[: LENGTH_HEADER.size + size]
        return messages


class Forks:
    """The process that forks workers, as the rank sees it. It starts with the first worker."""

    def __init__(self, setup: WorkerSetup):
        self.setup = setup
        self._parent: subprocess.Popen | None = None
        self._control: Connection

    @property
    def running(self) -> bool:
        return self._parent is not None

    def fork(self) -> tuple[int, Connection]:
        """Start a worker; return the values of a Worker.

        Raises OSError or EOFError if the process that forks has ended, and ValueError if it cannot
        import the user's code.
        """
        if self._parent is None:
            self._start()
        self._control.send(FORK)
        process = self._control.recv()
        return process, Connection(recv_handle(self._control))

    def end(self, worker: Worker) -> str:
        """Kill a worker and the processes that it started, and return a text on how it ended.

        Raises OSError or EOFError if the process that forks has ended.
        """
        worker.kill()
        self._control.send(worker.process)
        status = self._control.recv()
        if os.WIFSIGNALED(status):
            return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"has ended with exit code {os.waitstatus_to_exitcode(status)}"

    def close(self) -> None:
        """End the process that forks, and all workers with it."""
        if self._parent is not None:
            self._control.close()
            self._parent.kill()
            self._parent.wait()
            self._parent = None

    def _start(self) -> None:
        self._control, child_end = Pipe()
        path = [str(folder) for folder in sys.path]
        program = (
            f"import sys; sys.path[:] = {path!r}; from lightrft.rewards.forks import main;"
            f" main({child_end.fileno()})"
        )
        self._parent = subprocess.Popen(
            [sys.executable, "-c", program], pass_fds=[child_end.fileno()], start_new_session=True
        )
        child_end.close()
        self._control.send_bytes(pickle.dumps(self.setup))

        if problem := self._control.recv():
            self.close()
            raise ValueError(problem)


# -- in the process that forks


@dataclass(frozen=True, slots=True)
class Keeper:
    """The process that waits for a worker."""

    process: int
    socket: Connection

    def status(self) -> int:
        """Wait until the worker and all that it has started have ended; return its exit status."""
        try:
            self.socket.send(None)
            status = self.socket.recv()
        except (EOFError, OSError):  # it was killed, and the worker with it
            status = signal.SIGKILL
        self.socket.close()
        os.waitpid(self.process, 0)
        return status


def main(fd: int) -> None:
    """Import the code of the setup that the rank sends over `fd`, then fork workers.

    It ends when the rank closes the socket.
    """
    end_with(os.getppid())
    # A rank may end at any time, also while it waits for an answer, and nobody else reads one.
    with suppress(EOFError, ConnectionError):
        _serve(Connection(fd))


def _serve(control: Connection) -> None:
    setup: WorkerSetup = pickle.loads(control.recv_bytes())
    try:
        work = setup.prepare()
    except Exception as error:
        control.send(f"{type(error).__name__}: {error}"[:LONGEST_PROBLEM])
        return

    control.send("")
    keepers: dict[int, Keeper] = {}
    while True:
        try:
            request = control.recv()
        except (EOFError, OSError):  # the rank has ended, perhaps before it had read everything
            return
        if request == FORK:
            _fork(control, work, setup.memory, keepers)
        else:
            control.send(keepers.pop(request).status())


def _fork(
    control: Connection, work: Callable[[Connection], None], memory: int, keepers: dict[int, Keeper]
) -> None:
    """Start a worker, and send the process id and the socket to the rank.

    Its keeper is added to `keepers`.
    """
    parent_end, child_end = Pipe()
    keeper_end, report = Pipe()
    parent = os.getpid()
    keeper = os.fork()
    if keeper == 0:
        sockets = [each.socket for each in keepers.values()]
        for inherited in (control, parent_end, keeper_end, *sockets):
            inherited.close()
        end_with(parent, signal.SIGHUP)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        parent = os.getpid()
        process = os.fork()
        if process == 0:
            report.close()
            os.setsid()  # processes that it starts are killed with it
            end_with(parent)
            _limit_memory(memory)
            faulthandler.register(STACK_SIGNAL, file=child_end.fileno(), all_threads=False)
            work(child_end)
            os._exit(0)

        child_end.close()
        _keep(process, report)
        os._exit(0)

    child_end.close()
    report.close()
    process = keeper_end.recv()
    keepers[process] = Keeper(keeper, keeper_end)
    control.send(process)
    send_handle(control, parent_end.fileno(), 0)
    parent_end.close()


def _keep(process: int, report: Connection) -> None:
    """Wait for the end of a worker, and kill what it has left; report its status when asked.

    Until then nobody else can have its process id, which the rank may still send a signal to.
    """

    def end(*_: Any) -> None:
        os.kill(process, signal.SIGKILL)

    signal.signal(signal.SIGHUP, end)
    report.send(process)
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid) != process:
        os.waitpid(ended, 0)  # a process that the worker has left ends before it

    keeper = psutil.Process()
    while left := [child.pid for child in keeper.children() if child.pid != process]:
        for child in left:
            os.kill(child, signal.SIGKILL)
        os.waitpid(left[0], 0)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with suppress(EOFError, OSError):  # the process that forks has ended
        report.recv()
        report.send(os.waitpid(process, 0)[1])


def end_with(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal when the parent ends; end it if the parent has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:  # the kernel sends no signal for what happened before
        os._exit(1)


def _limit_memory(memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        lines = Path("/proc/self/status").read_text().splitlines()
        used = next(line for line in lines if line.startswith("VmData"))
        limit = int(used.split()[1]) * 1024 + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
