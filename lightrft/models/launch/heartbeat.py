"""Send heartbeats to rank 0, and end all ranks with one cause if a rank fails, dies or stalls."""

import atexit
import ipaddress
import json
import os
import secrets
import select
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist
from loguru import logger

from lightrft.models.launch.connection import Connection, ConnectionLost
from lightrft.models.launch.monitor import ARRIVAL, OUTSIDE, REPORT_SECONDS, Monitor, death, when
from lightrft.models.launch.rendezvous import tell_launcher
from lightrft.models.parallel.mesh import collectives_begun
from lightrft.models.parallel.processes import RunProcesses

BEAT = 5.0
"""Seconds between two heartbeats of a rank; less if the time limit is short."""
GRACE = 3.0
"""Seconds by which ranks outlive the failed rank of the node, so that the launcher sees the failed
one end first. Ranks of other nodes do not wait: a launcher reports nothing about its ranks if the
launcher of another node ends before them."""
LOOPBACK = "127.0.0.1"
COLLECTIVE_MARGIN = timedelta(seconds=60)
"""Time that collectives have beyond the limit, because the timeout of a collective says less."""
PACKAGE = str(Path(__file__).parents[2])
STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
LIBRARIES = {"site-packages", "dist-packages"}
"""Names of folders with installed packages, of this environment or another."""
EXIT = os._exit
"""Kept here, because code of the user that calls os._exit must not end a run (registry.py)."""
_count = 0


class Watchdog:
    """Thread on every rank with a connection to the monitor on rank 0.

    It reports the rank's phase, the current line, and the number of collectives that were begun in
    each group. It ends this process when the monitor announces a failure: a rank failed or died, or
    a collective waited longer than `limit` seconds.
    """

    def __init__(self, processes: RunProcesses, *, limit: timedelta, phase_limit: timedelta):
        """Connect to rank 0; all ranks call it together.

        The store only says where rank 0 listens. It does not replace the connection: a store says
        nothing when a process dies, and a call blocks while the process that serves it is stopped.
        """
        global _count
        _count += 1
        store = processes.store
        rank = processes.rank
        world_size = processes.size
        self.rank = rank
        self.side = processes.side
        self.limit = limit.total_seconds()
        phase_seconds = phase_limit.total_seconds()
        self.beat = min(BEAT, self.limit / 4, phase_seconds / 4)
        self._process = os.getpid()
        self._failure: dict[str, Any] | None = None
        self._complete = threading.Event()
        self._decided = threading.Event()
        self._closed = self._unwatched = False
        self._failed = False
        self._next_beat = self._stalled = 0.0
        self._monitor: Monitor | None = None
        self._phase_of_rank_0 = "start-up"

        key = f"lightrft/watchdog/{_count}"
        if rank == 0:
            token = secrets.token_hex(16)
            address = _listening_address(world_size)
            limits = {"limit": self.limit, "phase_limit": phase_seconds, "beat": self.beat}
            self._monitor = Monitor(world_size, address=address, token=token, **limits)
            store.set(key, json.dumps({**_self(), "port": self._monitor.port, "token": token}))

        self._rank_0 = json.loads(store.get(key))
        self._connection = _connect(self._rank_0, world_size)
        self._connection.send({"hello": {**_self(), "rank": rank, "token": self._rank_0["token"]}})
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._hook = sys.excepthook
        sys.excepthook = self._uncaught
        self._complete.wait(2 * ARRIVAL)  # if a rank does not arrive, the run ends before that

    def enter(self, phase: str) -> None:
        """Report the phase that this rank enters."""
        self._connection.send({"phase": phase})

    def fail(self, error: BaseException, *, code: int = 1, brief: bool = False) -> NoReturn:
        """End all ranks; the rank that failed first logs the error, `brief` or with traceback."""
        message = str(error) if brief else "".join(traceback.format_exception(error)).rstrip()
        echo = is_secondary(error)
        self._failed = True
        summary = f"{type(error).__name__}: {error}"[:2000]
        self._connection.send(
            {"failed": {"error": summary, "code": code, "brief": brief, "echo": echo}}
        )
        self._decided.wait(2 * REPORT_SECONDS)
        if self._failure is not None and self._failure["root"] != self.rank:
            time.sleep(GRACE + REPORT_SECONDS)  # the thread ends this process meanwhile
        if self._failure is not None and echo:
            message = f"{message}\n{self._failure['cause']}"
        logger.error(message)
        exit_process(message, code)

    def close(self) -> None:
        """End the watchdog of a rank that ends regularly."""
        if self._closed or os.getpid() != self._process:
            return

        self._closed = True
        atexit.unregister(self.close)
        sys.excepthook = self._hook
        if self._monitor is not None:
            self._monitor.closing.set()
        self._connection.send({"bye": True})
        if self._monitor is not None:
            self._monitor.join()
        self._connection.shut()
        self._thread.join(self.beat)

    def _run(self) -> None:
        before = time.monotonic()
        issued = self._collectives_begun()
        while True:
            now = time.monotonic()
            # A longer time means that the process was stopped, which says nothing about rank 0.
            self._stalled = self._stalled + min(now - before, 2 * self.beat)
            before = now

            if now >= self._next_beat:
                issued_before = issued
                issued = self._collectives_begun()
                if issued != issued_before:
                    self._stalled = 0.0
                self._connection.send({"state": {"place": position(), "issued": issued}})
                self._next_beat = now + self.beat

            if self._stalled > self.limit and not (self._closed or self._unwatched):
                self._end_for_rank_0(
                    f"{self._name_of_rank_0} has sent no heartbeat for more than {self.limit:.0f} s"
                    f" (--timeout_minutes), the last one {when(self._phase_of_rank_0)}: its process"
                    " is suspended, or holds Python's global interpreter lock. This rank is at"
                    f" {position()}"
                )
            select.select([self._connection.socket], [], [], self._next_beat - now)
            try:
                for message in self._connection.receive():
                    self._stalled = 0.0
                    self._receive(message)
            except ConnectionLost as reason:
                if not (self._closed or self._unwatched):
                    host, phase = self._rank_0["host"], self._phase_of_rank_0
                    self._end_for_rank_0(death(self._name_of_rank_0, host, phase, reason))
                break

        self._connection.close()

    def _collectives_begun(self) -> dict[str, int]:
        """Return the number of collectives in each group; the side makes names unique."""
        return {
            f"{self.side} {name}".lstrip(): count for name, count in collectives_begun().items()
        }

    def _receive(self, message: dict[str, Any]) -> None:
        if "phase" in message:
            self._phase_of_rank_0 = message["phase"]
        elif "complete" in message:
            self._complete.set()
        elif "ask" in message:
            self._next_beat = 0
        elif "failure" in message:
            self._end(message["failure"])
        elif "bye" in message:
            self._unwatched = True

    def _end(self, failure: dict[str, Any]) -> None:
        self._failure = failure
        self._decided.set()
        is_root = failure["root"] == self.rank
        if is_root and self._failed:
            time.sleep(GRACE + REPORT_SECONDS)  # the failing thread ends this process meanwhile

        if failure["brief"]:
            # Most user errors occur on all ranks, so this one may be about to report the same.
            time.sleep(0.5)

        if not (failure["brief"] and self._failed):
            logger.error(f"this run ends: {failure['cause']}")
        if failure["node"] == _self()["node"] and not is_root:
            time.sleep(GRACE)
        exit_process(failure["cause"], failure["code"])

    def _end_for_rank_0(self, cause: str) -> None:
        """End because of rank 0, which cannot announce it: it is dead, or was silent too long."""
        node = self._rank_0["node"]
        self._end({"cause": cause, "root": 0, "node": node, "code": 1, "brief": False})

    @property
    def _name_of_rank_0(self) -> str:
        return f"rank 0 (pid {self._rank_0['pid']} on {self._rank_0['host']})"

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if os.getpid() == self._process and not self._closed:
            self.fail(error.with_traceback(trace))
        self._hook(kind, error, trace)


class SingleRankWatchdog:
    """Watchdog of a run with one rank: a thread ends the process if a phase takes too long."""

    def __init__(self, phase_limit: timedelta, activity: Callable[[], tuple[str, float]]):
        """Start the thread; `activity` returns the phase, and the monotonic time of its begin."""
        self._limit = phase_limit.total_seconds()
        self._activity = activity
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        left = self._limit
        while not self._closed.wait(left):
            phase, began = self._activity()
            left = began + self._limit - time.monotonic()
            if left <= 0 and phase not in OUTSIDE:
                cause = (
                    f"phase {phase} has taken more than {self._limit:.0f} s"
                    f" (--phase_minutes), at {position()}"
                )
                logger.error(f"this run ends: {cause}")
                exit_process(cause, 1)
            left = left if left > 0 else self._limit


def is_secondary(error: BaseException | None) -> bool:
    """Return True for an error that another rank caused: a collective or the store failed."""
    while error is not None:
        if isinstance(error, dist.DistError) or "/gloo/transport/" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def exit_process(cause: str, code: int) -> NoReturn:
    """End this process immediately: nothing interrupts a main thread that is in a collective."""
    tell_launcher(cause)
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        sys.__stderr__.write("\x1b[?25h")  # show the cursor, which a live display hides
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    EXIT(code)


def position() -> str:
    """Return the current position of the main thread."""
    return code_position(threading.main_thread().ident or 0)


def code_position(thread: int) -> str:
    """Return where a thread is in our code or the user's: the innermost line and two callers."""
    lines: list[str] = []
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and len(lines) < 3:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) or not (
            file.startswith((*STANDARD_LIBRARY, "<")) or LIBRARIES & set(Path(file).parts)
        ):
            short = file.removeprefix(str(Path(PACKAGE).parent) + os.sep)
            lines.append(f"{short}:{frame.f_lineno} ({frame.f_code.co_qualname})")
        frame = frame.f_back

    return " < ".join(lines) or "no line of its own"


def _self() -> dict[str, Any]:
    host = socket.gethostname()
    return {"host": host, "pid": os.getpid(), "node": f"{host}/{os.environ.get('GROUP_RANK', '')}"}


def _one_node(world_size: int) -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)


def _listening_address(world_size: int) -> str | None:
    """Return the address where rank 0 listens for other ranks.

    None means all addresses: the name of this host resolves to loopback or not at all.
    """
    if _one_node(world_size):
        return LOOPBACK
    host = os.environ.get("MASTER_ADDR", socket.gethostname())
    try:
        addresses = [entry[0] for *_, entry in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    except OSError:
        return None
    return None if any(ipaddress.ip_address(one).is_loopback for one in addresses) else host


def _connect(listener: dict[str, Any], world_size: int) -> Connection:
    """Connect to rank 0 at MASTER_ADDR or, if that is not set, at the listener's host name."""
    host = LOOPBACK if _one_node(world_size) else os.environ.get("MASTER_ADDR", listener["host"])
    try:
        return Connection(socket.create_connection((host, listener["port"]), timeout=60))
    except OSError as error:
        raise RuntimeError(
            f"{socket.gethostname()} cannot connect to rank 0 at {host}:{listener['port']}"
            f" ({error}). Ranks communicate over ports that the system chooses: a firewall between"
            " the nodes must allow these connections"
        ) from error
