"""Rank 0 listens to all ranks: where each one is, who has gone, who is late. Its one verdict ends the run on all of them."""

import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lightrft.strategy.connection import FIRST, PENDING, Connection, Gone, keep_from_children

PATIENCE = 5.0
"""Seconds that a failed collective waits for its cause: the rank that failed by itself, or died."""
ARRIVAL = 60.0
"""Seconds until every rank must have come, after all have met in the process group."""
OUTSIDE = ("", "start-up")
"""Phases without a limit: a program that never says what it does is in one of them all the time."""


@dataclass
class Seat:
    """What is known of one rank. Times are this process's monotonic clock."""

    rank: int
    host: str
    pid: int
    node: str
    """Host and launcher: two of these may share a machine."""
    connection: Connection
    phase: str = "start-up"
    """Empty between phases."""
    phase_began: float = field(default_factory=time.monotonic)
    place: str = ""
    """Where in our code or the user's its main thread was at its last beat."""
    issued: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Group -> collectives that this rank has begun in it, and when it was first seen to have begun the newest."""
    heard: float = field(default_factory=time.monotonic)
    left: bool = False
    """It ended in order."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    def observe(self, state: dict[str, Any]) -> None:
        before, now = self.issued, time.monotonic()
        self.place, self.heard = state["place"], now
        self.issued = {
            group: before[group] if group in before and before[group][0] == count else (count, now)
            for group, count in state["issued"].items()
        }


class Monitor:
    """A thread of rank 0, which is idle but for a line from every rank at every beat."""

    def __init__(self, world_size: int, *, address: str | None, limit: float, phase_limit: float, beat: float, token: str):
        """`address` is where ranks connect, None for all that this machine has. Seconds: a collective may wait for `limit`, a
        phase may take all ranks `phase_limit`, and a `beat` is between two looks."""
        self.world_size, self.limit, self.phase_limit, self.beat, self.token = world_size, limit, phase_limit, beat, token
        self.seats: dict[int, Seat] = {}
        self._listening = listening_socket(address, world_size)
        keep_from_children(self._listening)
        self.port: int = self._listening.getsockname()[1]
        self._began = time.monotonic()
        self._verdict: dict[str, Any] | None = None
        self._echo: tuple[float, dict[str, Any]] | None = None
        self.closing = threading.Event()
        """Set it before rank 0 says that it leaves: the others then hear that nobody watches any more."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(2 * self.beat)

    def _run(self) -> None:
        look, next_look, next_beat = min(self.beat, PATIENCE / 5), 0.0, 0.0
        while not self.closing.is_set():
            for key, _ in self._selector.select(look):
                if key.fileobj is self._listening:
                    connection = Connection(self._listening.accept()[0], longest=FIRST)
                    self._selector.register(connection.socket, selectors.EVENT_READ, connection)
                else:
                    self._hear(key.data)
            now = time.monotonic()
            if self._verdict is None and now >= next_look:
                self._judge(now)
                next_look = now + look
            if now >= next_beat:
                self._tell_all({"beat": True})
                next_beat = now + self.beat
        self._tell_all({"bye": True})
        for connection in [self._listening, *(seat.connection for seat in self.seats.values())]:
            connection.close()

    # -- hearing

    def _hear(self, connection: Connection) -> None:
        seat = next((seat for seat in self.seats.values() if seat.connection is connection), None)
        try:
            for message in connection.receive():
                if seat is None:
                    seat = self._admit(message["hello"], connection)
                else:
                    self._note(seat, message)
        except (Gone, ValueError, KeyError, TypeError) as reason:  # what is no message of ours comes from a stranger
            self._selector.unregister(connection.socket)
            connection.close()
            if seat is not None and not seat.left:
                self._end(death(seat.name, seat.host, seat.phase, reason), root=seat.rank)

    def _admit(self, hello: dict[str, Any], connection: Connection) -> Seat:
        if not secrets.compare_digest(hello["token"], self.token):
            raise ValueError("a stranger")
        connection.longest = PENDING
        seat = Seat(hello["rank"], hello["host"], hello["pid"], hello["node"], connection)
        self.seats[seat.rank] = seat
        if len(self.seats) == self.world_size:
            self._tell_all({"complete": True})
        return seat

    def _note(self, seat: Seat, message: dict[str, Any]) -> None:
        if "state" in message:
            seat.observe(message["state"])
        elif "phase" in message:
            seat.phase, seat.phase_began = message["phase"], time.monotonic()
            if seat.rank == 0:  # should it die, the others have to say where it was
                self._tell_all(message)
        elif "failed" in message:
            self._failed(seat, message["failed"])
        elif "bye" in message:
            seat.left = True

    # -- judging

    def _failed(self, seat: Seat, failure: dict[str, Any]) -> None:
        verdict = {"root": seat.rank, "code": failure["code"], "brief": failure["brief"],
                   "cause": f"{seat.name} failed {when(seat.phase)}: {failure['error']}"}
        if not failure["echo"]:
            self._end(**verdict)
        elif self._echo is None:
            self._echo = time.monotonic() + PATIENCE, verdict
            self._tell_all({"ask": "state"})

    def _judge(self, now: float) -> None:
        if self._echo and now > self._echo[0]:
            verdict = self._echo[1]
            verdict["cause"] += f"\nNo rank died or failed otherwise. {self._report(self._behind(), now)}"
            self._end(**verdict)
        elif self._longest_wait(now) > self.limit:
            behind = self._behind()
            headline = f"a collective has waited for more than {self.limit:.0f} s (--timeout_minutes)"
            root = min((seat.rank for seat in self.seats.values() if seat.rank not in behind and not seat.left), default=0)
            self._end(f"{headline}. {self._report(behind, now)}", root=root)
        elif phases := self._endless(now):
            headline = f"phase {', '.join(phases)} has taken all ranks more than {self.phase_limit:.0f} s (--phase_minutes)"
            self._end(f"{headline}. {self._report({}, now)}", root=0)
        elif now - self._began > ARRIVAL and len(self.seats) < self.world_size:
            absent = names(set(range(self.world_size)) - set(self.seats))
            self._end(f"{absent} ended, or hung, before it could say where it is", root=0)

    def _endless(self, now: float) -> list[str]:
        """The phases of all ranks, when all have been in theirs for too long."""
        present = [seat for seat in self.seats.values() if not seat.left]
        late = [seat for seat in present if seat.phase not in OUTSIDE and now - seat.phase_began > self.phase_limit]
        return sorted({seat.phase for seat in late}) if len(late) == len(present) else []

    def _counts(self) -> dict[str, dict[int, tuple[int, float]]]:
        """Group -> rank -> (collectives begun, since when)."""
        groups: dict[str, dict[int, tuple[int, float]]] = {}
        for seat in self.seats.values():
            for group, count in seat.issued.items():
                groups.setdefault(group, {})[seat.rank] = count
        return groups

    def _longest_wait(self, now: float) -> float:
        """Seconds that the collective has waited which some of its group's ranks have begun and others have not."""
        waits = [0.0]
        for members in self._counts().values():
            fewest = min(count for count, _ in members.values())
            waits += [now - since for count, since in members.values() if count > fewest]
        return max(waits)

    def _behind(self) -> dict[int, str]:
        """Rank -> what it has not begun though others of its group have."""
        late = {}
        for group, members in self._counts().items():
            most = max(count for count, _ in members.values())
            late.update({rank: f"has begun {count} of {most} collectives in {group}"
                         for rank, (count, _) in members.items() if count < most})
        return late

    def _report(self, behind: dict[int, str], now: float) -> str:
        """Who is late, and where everybody is; ranks at the same place share a line."""
        groups: dict[str, list[Seat]] = {}
        for seat in self.seats.values():
            lateness = f"late: {behind[seat.rank]}; " if seat.rank in behind else ""
            silent = f"; silent for {now - seat.heard:.0f} s" if now - seat.heard > 3 * self.beat else ""
            where = "has left the run" if seat.left else f"{lateness}{when(seat.phase)}, at {seat.place}{silent}"
            groups.setdefault(where, []).append(seat)
        lines = [f"  {_who(seats)}: {where} (for {now - min(seat.phase_began for seat in seats):.0f} s)"
                 for where, seats in groups.items()]
        headline = f"Late: {names(behind)}." if behind else "No rank is behind the others."
        return "\n".join([headline, *lines])

    def _end(self, cause: str, *, root: int, code: int = 1, brief: bool = False) -> None:
        """Only the first verdict counts. Rank 0 hears it last, so that all have it when this process ends."""
        if self._verdict is None:
            node = self.seats[root].node if root in self.seats else ""
            self._verdict = {"cause": cause, "root": root, "node": node, "code": code, "brief": brief}
            self._tell_all({"verdict": self._verdict})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for rank in sorted(self.seats, reverse=True):
            self.seats[rank].connection.send(message)


def listening_socket(address: str | None, backlog: int) -> socket.socket:
    """A port that the system chooses. Where `address` is no address of this machine but leads here, as of a service of a
    cluster, it is open on all of them."""
    if address is not None:
        for family, _, _, _, place in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            with suppress(OSError):
                return socket.create_server(place[:2], family=family, backlog=backlog)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=both)


def death(who: str, host: str, phase: str, reason: Exception) -> str:
    return (f"{who} ended without a word {when(phase)}: it was killed or crashed ({reason}). "
            f"Its own log says more; if it says nothing, see whether {host} ran out of memory (dmesg)")


def when(phase: str) -> str:
    return f"in phase {phase}" if phase else "between phases"


def _who(seats: list[Seat]) -> str:
    return seats[0].name if len(seats) == 1 else names(seat.rank for seat in seats)


def names(ranks: Any) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(texts)}"
