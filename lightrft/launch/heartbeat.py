"""No rank waits forever and none ends alone: each tells rank 0 where it is, and all end together with one cause."""

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
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

import torch.distributed as dist
from loguru import logger
from torch.distributed.distributed_c10d import _get_default_store

from lightrft.launch.connection import Connection, ConnectionLost
from lightrft.launch.monitor import ARRIVAL, OUTSIDE, PATIENCE, Monitor, death, when
from lightrft.launch.rendezvous import tell_launcher
from lightrft.parallel.mesh import collectives_begun

BEAT = 5.0
"""Seconds between two messages of a rank; less where the limit is short."""
GRACE = 3.0
"""Seconds by which ranks outlive the one beside them that is the cause, so that their launcher sees the cause end first. Ranks of
other nodes do not wait: a launcher fails, and says nothing of its ranks, when that of another node has ended before them."""
LOOPBACK = "127.0.0.1"
MARGIN = timedelta(seconds=60)
"""Time that collectives have beyond the limit: their own ways to end say less."""
PACKAGE = str(Path(__file__).parents[1])
STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
LIBRARIES = {"site-packages", "dist-packages"}
"""Folders of them: those of another environment may lie beneath."""
_count = 0


class Watchdog:
    """On every rank a thread with a connection to rank 0's monitor.

    It says which phase the rank is in, which line, and how many collectives it has begun in each of its groups. It ends this
    process when the monitor says so: a rank failed or died, or a collective has waited longer than `limit` seconds.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, limit: float, phase_limit: float):
        """All ranks together. `store` is only asked where rank 0 listens."""
        global _count
        _count += 1
        self.rank, self.limit, self.beat = rank, limit, min(BEAT, limit / 4, phase_limit / 4)
        self._process = os.getpid()
        self._failure: dict[str, Any] | None = None
        self._complete, self._decided = threading.Event(), threading.Event()
        self._closed = self._unwatched = False
        self._failed = False
        self._next_beat = self._stood = 0.0
        self._monitor: Monitor | None = None
        self._phase_of_rank_0 = "start-up"
        key = f"lightrft/watchdog/{_count}"
        if rank == 0:
            token, address = secrets.token_hex(16), _listening_address(world_size)
            limits = {"limit": limit, "phase_limit": phase_limit, "beat": self.beat}
            self._monitor = Monitor(world_size, address=address, token=token, **limits)
            store.set(key, json.dumps({**_self(), "port": self._monitor.port, "token": token}))
        self._rank_0 = json.loads(store.get(key))
        self._connection = _connect(self._rank_0, world_size)
        self._connection.send({"hello": {**_self(), "rank": rank, "token": self._rank_0["token"]}})
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._hook, sys.excepthook = sys.excepthook, self._uncaught
        self._complete.wait(2 * ARRIVAL)  # a rank that does not come ends the run before

    @classmethod
    def start(cls, limit: timedelta, phase_limit: timedelta) -> "Self | Alone":
        """Watch the default process group; the one rank of a group of one watches itself."""
        world_size = dist.get_world_size()
        if world_size == 1:
            return Alone(phase_limit.total_seconds())
        limits = {"limit": limit.total_seconds(), "phase_limit": phase_limit.total_seconds()}
        return cls(_get_default_store(), rank=dist.get_rank(), world_size=world_size, **limits)

    def enter(self, phase: str) -> None:
        """What this rank does from now on."""
        self._connection.send({"phase": phase})

    def fail(self, error: BaseException, *, code: int = 1, brief: bool = False) -> NoReturn:
        """End all ranks; the first cause is said by the rank that has it, `brief`ly or with its traceback."""
        said = str(error) if brief else "".join(traceback.format_exception(error)).rstrip()
        echo = is_echo(error)
        self._failed = True
        summary = f"{type(error).__name__}: {error}"[:2000]
        self._connection.send({"failed": {"error": summary, "code": code, "brief": brief, "echo": echo}})
        self._decided.wait(2 * PATIENCE)
        if self._failure is not None and self._failure["root"] != self.rank:
            time.sleep(GRACE + PATIENCE)  # meanwhile the thread ends this process
        if self._failure is not None and echo:
            said = f"{said}\n{self._failure['cause']}"
        logger.error(said)
        leave(said, code)

    def close(self) -> None:
        """This rank ends in order."""
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
        before, issued = time.monotonic(), collectives_begun()
        while True:
            now = time.monotonic()
            self._stood, before = self._stood + min(now - before, 2 * self.beat), now  # more: the process was stopped
            if now >= self._next_beat:
                issued_before, issued = issued, collectives_begun()
                if issued != issued_before:
                    self._stood = 0.0
                self._connection.send({"state": {"place": place(), "issued": issued}})
                self._next_beat = now + self.beat
            if self._stood > self.limit and not (self._closed or self._unwatched):
                self._end(self._silence_of_rank_0())
            select.select([self._connection.socket], [], [], self._next_beat - now)
            try:
                for message in self._connection.receive():
                    self._stood = 0.0
                    self._hear(message)
            except ConnectionLost as reason:
                if not (self._closed or self._unwatched):
                    self._end(self._death_of_rank_0(reason))
                break
        self._connection.close()

    def _hear(self, message: dict[str, Any]) -> None:
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
        mine = failure["root"] == self.rank
        if mine and self._failed:
            time.sleep(GRACE + PATIENCE)  # meanwhile the failing thread ends this process
        if failure["brief"]:
            time.sleep(0.5)  # most errors of users meet all ranks: this one may be about to say the same
        if not (failure["brief"] and self._failed):
            logger.error(f"this run ends: {failure['cause']}")
        if failure["node"] == _self()["node"] and not mine:
            time.sleep(GRACE)
        leave(failure["cause"], failure["code"])

    def _death_of_rank_0(self, reason: ConnectionLost) -> dict[str, Any]:
        """Return the failure that no monitor can announce any more."""
        return self._failure_of_rank_0(death(self._name_of_rank_0, self._rank_0["host"], self._phase_of_rank_0, reason))

    def _silence_of_rank_0(self) -> dict[str, Any]:
        """Return the failure for `limit` seconds in which this rank neither heard of the monitor nor began a collective."""
        return self._failure_of_rank_0(
            f"{self._name_of_rank_0} has been silent for more than {self.limit:.0f} s (--timeout_minutes), last heard of "
            f"{when(self._phase_of_rank_0)}: its process is stopped, or holds Python's lock. This rank is at {place()}"
        )

    @property
    def _name_of_rank_0(self) -> str:
        return f"rank 0 (pid {self._rank_0['pid']} on {self._rank_0['host']})"

    def _failure_of_rank_0(self, cause: str) -> dict[str, Any]:
        return {"cause": cause, "root": 0, "node": self._rank_0["node"], "code": 1, "brief": False}

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if os.getpid() == self._process and not self._closed:
            self.fail(error.with_traceback(trace))
        self._hook(kind, error, trace)


class Alone:
    """The watchdog of a run of one rank: a thread that sleeps, and ends the process when a phase has taken too long."""

    def __init__(self, phase_limit: float):
        self._limit, self._phase, self._deadline = phase_limit, "", 0.0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def enter(self, phase: str) -> None:
        with self._changed:
            self._phase, self._deadline = phase, time.monotonic() + self._limit
            if self._thread is None and phase not in OUTSIDE:
                self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
                self._thread.start()

    def fail(self, error: BaseException, *, code: int = 1, brief: bool = False) -> None:
        """Return: nobody else has to be told."""

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._deadline = 0.0
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while self._deadline:
                left = self._deadline - time.monotonic()
                if left <= 0 and self._phase not in OUTSIDE:
                    cause = f"phase {self._phase} has taken more than {self._limit:.0f} s (--phase_minutes), at {place()}"
                    logger.error(f"this run ends: {cause}")
                    leave(cause, 1)
                self._changed.wait(left if left > 0 else self._limit)


def is_echo(error: BaseException | None) -> bool:
    """Whether a rank meets this error because of another one: its collective or its store broke, or waited too long."""
    while error is not None:
        if isinstance(error, dist.DistError) or "/gloo/transport/" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def leave(cause: str, code: int) -> NoReturn:
    """End this process now: the main thread may wait in a collective that nothing can interrupt."""
    tell_launcher(cause)
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        sys.__stderr__.write("\x1b[?25h")  # a live display hides the cursor
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def place() -> str:
    """Where the main thread is."""
    return place_of(threading.main_thread().ident or 0)


def place_of(thread: int) -> str:
    """Where a thread is in our code or the user's: the innermost line, and two of its callers."""
    lines: list[str] = []
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and len(lines) < 3:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) or not (file.startswith((*STANDARD_LIBRARY, "<")) or LIBRARIES & set(Path(file).parts)):
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
    """The address at which the ranks find rank 0, or None, all addresses, where its name means only this machine here."""
    if _one_node(world_size):
        return LOOPBACK
    host = os.environ.get("MASTER_ADDR", socket.gethostname())
    try:
        found = [place[0] for *_, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    except OSError:
        return None
    return None if any(ipaddress.ip_address(one).is_loopback for one in found) else host


def _connect(listener: dict[str, Any], world_size: int) -> Connection:
    """Rank 0 is where MASTER_ADDR says; where nobody says, on the host of that name."""
    host = LOOPBACK if _one_node(world_size) else os.environ.get("MASTER_ADDR", listener["host"])
    try:
        return Connection(socket.create_connection((host, listener["port"]), timeout=60))
    except OSError as error:
        raise RuntimeError(
            f"{socket.gethostname()} cannot connect to rank 0 at {host}:{listener['port']} ({error}). Ranks talk over ports that "
            "the system chooses: a firewall between the nodes has to let them through"
        ) from error
