"""Watch all ranks from rank 0: find dead and late ones, and announce what ends the run."""

import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from itertools import groupby
from typing import Any

from lightrft.models.launch.connection import (
    MAX_FIRST_LINE,
    PENDING,
    Connection,
    ConnectionLost,
    keep_from_children,
)

REPORT_SECONDS = 5.0
"""Seconds that the report of a failed collective waits for a rank that failed by itself or died."""
CONNECTION_BACKLOG = 128
"""Fewest connections that may wait to be accepted, so that a few unauthenticated peers keep no rank out."""
RELAY = 0.1
"""Fewest seconds between two reports of rank 0's phase to the others: short steps have many."""
RETRY = 0.1
"""Seconds between two attempts to accept a connection, if that fails."""
ARRIVAL = 60.0
"""Seconds that ranks have to connect, after all have joined the process group."""
OUTSIDE = ("", "start-up")
"""Phases without a time limit; a program that never announces a phase is always in one of them."""


@dataclass
class RankStatus:
    """State of a rank, as the monitor knows it. Times are from this process's monotonic clock."""

    rank: int
    host: str
    pid: int
    node: str
    """Host and launcher; several launchers may share a machine."""
    connection: Connection
    phase: str = "start-up"
    """Empty between phases."""
    phase_began: float = field(default_factory=time.monotonic)
    position: str = ""
    """Position of the main thread in our code or the user's at the last heartbeat."""
    issued: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Group -> number of collectives that this rank has begun, and when that was first seen."""
    heard: float = field(default_factory=time.monotonic)
    left: bool = False
    """True if the rank has ended regularly."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    def observe(self, state: dict[str, Any]) -> None:
        before = self.issued
        now = time.monotonic()
        self.position = state["place"]
        self.heard = now
        self.issued = {
            group: before[group] if group in before and before[group][0] == count else (count, now)
            for group, count in state["issued"].items()
        }


@dataclass(eq=False)
class Monitor:
    """Thread of rank 0 that hears one line from each rank per heartbeat, and is idle otherwise."""

    world_size: int
    address: InitVar[str | None]
    """Address that ranks connect to; None listens on all addresses of this machine."""
    limit: float
    """Longest wait of a collective, in seconds."""
    phase_limit: float
    """Longest time that all ranks may be in a phase, in seconds."""
    beat: float
    """Time between two checks, in seconds."""
    token: str

    def __post_init__(self, address: str | None) -> None:
        self.statuses: dict[int, RankStatus] = {}
        self._senders: dict[Connection, RankStatus] = {}
        self._unauthenticated: dict[Connection, float] = {}
        """Connections that have not said who they are -> when they were accepted."""
        self._listening = listening_socket(address, max(self.world_size, CONNECTION_BACKLOG))
        keep_from_children(self._listening)
        self.port: int = self._listening.getsockname()[1]
        self._began = time.monotonic()
        self._failure: dict[str, Any] | None = None
        self._echo: tuple[float, str, dict[str, Any]] | None = None
        self._phase_of_rank_0: str | None = None
        """Phase to report to the others; None once they know it."""
        self.closing = threading.Event()
        """Event to set before rank 0 leaves; the other ranks are then informed that the monitor has
        ended."""

        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(2 * self.beat)

    def _run(self) -> None:
        look = min(self.beat, REPORT_SECONDS / 5)
        next_look = 0.0
        next_beat = 0.0
        next_relay = 0.0
        while not self.closing.is_set():
            for key, _ in self._selector.select(look if self._phase_of_rank_0 is None else RELAY):
                if key.fileobj is self._listening:
                    self._accept()
                else:
                    self._receive(key.data)

            now = time.monotonic()
            if self._failure is None and now >= next_look:
                self._check(now)
                next_look = now + look
                self._close_unauthenticated(now)

            # If rank 0 dies, the others must report its phase.
            if self._phase_of_rank_0 is not None and now >= next_relay:
                self._tell_all({"phase": self._phase_of_rank_0})
                self._phase_of_rank_0 = None
                next_relay = now + RELAY

            if now >= next_beat:
                self._tell_all({"beat": True})
                next_beat = now + self.beat

        self._tell_all({"bye": True})
        connections = [status.connection for status in self.statuses.values()]
        for connection in (self._listening, *connections):
            connection.close()

    def _accept(self) -> None:
        """Accept a connection, or try again in a moment if no more files can be opened."""
        try:
            connection = Connection(self._listening.accept()[0], longest=MAX_FIRST_LINE)
        except OSError:
            time.sleep(RETRY)
            return
        self._unauthenticated[connection] = time.monotonic()
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _close_unauthenticated(self, now: float) -> None:
        """Close connections that have not said in time who they are."""
        for connection, since in list(self._unauthenticated.items()):
            if now - since > ARRIVAL:
                self._close(connection)

    def _close(self, connection: Connection) -> None:
        self._unauthenticated.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.close()

    # -- messages

    def _receive(self, connection: Connection) -> None:
        status = self._senders.get(connection)
        try:
            for message in connection.receive():
                if status is None:
                    status = self._admit(message["hello"], connection)
                else:
                    self._note(status, message)
        except (ConnectionLost, ValueError, KeyError, TypeError) as reason:
            # Invalid messages come from unauthenticated peers.
            self._close(connection)
            if status is not None and not status.left:
                self._end(death(status.name, status.host, status.phase, reason), root=status.rank)

    def _admit(self, hello: dict[str, Any], connection: Connection) -> RankStatus:
        if not secrets.compare_digest(hello["token"], self.token):
            raise ValueError("an unauthenticated peer")
        connection.longest = PENDING
        self._unauthenticated.pop(connection, None)
        status = RankStatus(hello["rank"], hello["host"], hello["pid"], hello["node"], connection)
        self.statuses[status.rank] = self._senders[connection] = status
        if len(self.statuses) == self.world_size:
            self._tell_all({"complete": True})
        return status

    def _note(self, status: RankStatus, message: dict[str, Any]) -> None:
        if "state" in message:
            status.observe(message["state"])
        elif "phase" in message:
            status.phase = message["phase"]
            status.phase_began = time.monotonic()
            if status.rank == 0:
                self._phase_of_rank_0 = status.phase
        elif "failed" in message:
            self._failed(status, message["failed"])
        elif "bye" in message:
            status.left = True

    # -- failure detection

    def _failed(self, status: RankStatus, report: dict[str, Any]) -> None:
        # An echo is an error that another rank caused, so the monitor waits for that rank first.
        cause = f"{status.name} failed {when(status.phase)}: {report['error']}"
        failure = {"root": status.rank, "code": report["code"], "brief": report["brief"]}
        if not report["echo"]:
            self._end(cause, **failure)
        elif self._echo is None:
            self._echo = time.monotonic() + REPORT_SECONDS, cause, failure
            self._tell_all({"ask": "state"})

    def _check(self, now: float) -> None:
        if self._echo and now > self._echo[0]:
            _, cause, failure = self._echo
            report = self._report(self._late_in_collectives(), now)
            self._end(f"{cause}\nNo rank died or failed otherwise. {report}", **failure)
        elif self._longest_wait(now) > self.limit:
            late = self._late_in_collectives()
            headline = (
                f"a collective has waited for more than {self.limit:.0f} s (--timeout_minutes)"
            )
            present = [status.rank for status in self.statuses.values() if not status.left]
            root = min(set(present) - late.keys(), default=0)
            self._end(f"{headline}. {self._report(late, now)}", root=root)

        elif phases := self._endless(now):
            headline = (
                f"phase {', '.join(phases)} has taken all ranks more than {self.phase_limit:.0f} s"
                " (--phase_minutes)"
            )
            self._end(f"{headline}. {self._report({}, now)}", root=0)
        elif now - self._began > ARRIVAL and len(self.statuses) < self.world_size:
            absent = names(set(range(self.world_size)) - set(self.statuses))
            self._end(f"{absent} ended, or hung, before it could send its position", root=0)

    def _endless(self, now: float) -> list[str]:
        """Return the phases of all ranks if each has taken too long, else none."""
        present = [status for status in self.statuses.values() if not status.left]
        late = [
            status
            for status in present
            if status.phase not in OUTSIDE and now - status.phase_began > self.phase_limit
        ]
        return sorted({status.phase for status in late}) if len(late) == len(present) else []

    def _counts(self) -> dict[str, dict[int, tuple[int, float]]]:
        """Return group -> rank -> (number of collectives begun, time of the newest)."""
        groups: dict[str, dict[int, tuple[int, float]]] = {}
        for status in self.statuses.values():
            for group, count in status.issued.items():
                groups.setdefault(group, {})[status.rank] = count
        return groups

    def _longest_wait(self, now: float) -> float:
        """Return the longest wait in seconds of a collective for ranks that have not begun it."""
        waits = [0.0]
        for members in self._counts().values():
            fewest = min(count for count, _ in members.values())
            waits += [now - since for count, since in members.values() if count > fewest]
        return max(waits)

    def _late_in_collectives(self) -> dict[int, str]:
        """Return rank -> which collectives others of a group have begun and it has not."""
        late = {}
        for group, members in self._counts().items():
            most = max(count for count, _ in members.values())
            late |= {
                rank: f"has begun {count} of {most} collectives in {group}"
                for rank, (count, _) in members.items()
                if count < most
            }

        return late

    def _report(self, late: dict[int, str], now: float) -> str:
        """Return a report of late ranks, and where all ranks are; equal positions share a line."""
        groups: dict[str, list[RankStatus]] = {}
        for status in self.statuses.values():
            lateness = f"late: {late[status.rank]}; " if status.rank in late else ""
            silent = ""
            if now - status.heard > 3 * self.beat:
                silent = f"; no heartbeat for {now - status.heard:.0f} s"
            if status.left:
                state = "has left the run"
            else:
                state = f"{lateness}{when(status.phase)}, at {status.position}{silent}"
            groups.setdefault(state, []).append(status)

        lines = [
            f"  {_name(statuses)}: {state} (for"
            f" {now - min(status.phase_began for status in statuses):.0f} s)"
            for state, statuses in groups.items()
        ]
        headline = f"Late: {names(late)}." if late else "No rank is behind the others."
        return "\n".join([headline, *lines])

    def _end(self, cause: str, *, root: int, code: int = 1, brief: bool = False) -> None:
        """Announce a failure to all ranks, rank 0 last, because this process ends then.

        Only the first failure counts.
        """
        if self._failure is not None:
            return
        node = self.statuses[root].node if root in self.statuses else ""
        self._failure = {"cause": cause, "root": root, "node": node, "code": code, "brief": brief}
        self._tell_all({"failure": self._failure})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for rank in sorted(self.statuses, reverse=True):
            self.statuses[rank].connection.send(message)


def listening_socket(address: str | None, backlog: int) -> socket.socket:
    """Open a socket on a port that the system chooses.

    It listens on all addresses if `address` is not local but is routed here, as for a cluster
    service.
    """
    if address is not None:
        for family, _, _, _, target in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            with suppress(OSError):
                return socket.create_server(target[:2], family=family, backlog=backlog)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=both)


def death(process: str, host: str, phase: str, reason: Exception) -> str:
    return (
        f"{process} ended without an error message {when(phase)}: it was killed or crashed"
        f" ({reason}). Its own log may show the cause; if not, check whether {host} ran out of"
        " memory (dmesg)"
    )


def when(phase: str) -> str:
    return f"in phase {phase}" if phase else "between phases"


def _name(statuses: list[RankStatus]) -> str:
    return statuses[0].name if len(statuses) == 1 else names(status.rank for status in statuses)


def names(ranks: Any) -> str:
    """Format ranks as `rank 3` or `ranks 0-2, 5`."""
    ordered = sorted(ranks)
    numbered = groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])
    spans = [[rank for _, rank in consecutive] for _, consecutive in numbered]
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(texts)}"
