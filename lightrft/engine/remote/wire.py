"""Messages between the ranks that train and those that generate."""

import os
import secrets
import socket
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue
from typing import Any

from lightrft.engine.requests import Request
from lightrft.parallel.processes import RunProcesses
from lightrft.types import Completion

LOOPBACK = "127.0.0.1"
KEY = "lightrft/rollout"
"""Prefix of the keys in the store of all processes."""
PRETRAIN = f"{KEY}/pretrain"
"""Key of the folder from which the engines are started."""
CAPACITY = f"{KEY}/capacity"
"""Key of the number of samples that an engine decodes at the same time."""


@dataclass(frozen=True, slots=True)
class Generate:
    """One call's requests for one engine. The ranks that train make the same calls, and each sends its own to every engine.

    Calls with negative numbers are those of one rank.
    """

    call: int
    requests: list[tuple[int, Request]]
    """Requests with their indices in the call of the rank."""
    version: int
    """Version of the weights that the engine must have loaded before it begins a call of one rank."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Completions of a request of a call."""

    call: int
    index: int
    completions: list[Completion]


@dataclass(frozen=True, slots=True)
class Abort:
    """End of the requests of a call that this rank has sent; each is answered with its completions so far."""

    call: int


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Announcement of a weight stream, which comes between the call `after` and the next one."""

    version: int
    after: int


@dataclass(frozen=True, slots=True)
class Closed:
    """End of the run, or of the connection."""


@dataclass(eq=False, slots=True)
class Peer:
    """Connection to a process of the other side. A thread receives its messages at once, so that the other side never waits."""

    rank: int
    connection: Connection
    inbox: "SimpleQueue[tuple[Peer, Any]]"
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._receive, name=f"messages of rank {self.rank}", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        self.connection.send(message)

    def close(self) -> None:
        self.connection.close()

    def _receive(self) -> None:
        """Pass the messages on until the other side closes; the last one is `Closed`, and comes once."""
        message: Any = None
        while not isinstance(message, Closed):
            try:
                message = self.connection.recv()
            except (OSError, EOFError):  # the watchdog names a rank that has died
                message = Closed()
            self.inbox.put((self, message))


def accept(processes: RunProcesses, inbox: "SimpleQueue[tuple[Peer, Any]]") -> list[Peer]:
    """Listen on this rank, which generates, and return the connections of all ranks that train, in rank order."""
    secret = secrets.token_hex(16)
    with Listener((_address(processes), 0), backlog=processes.size, authkey=secret.encode()) as listener:
        host = LOOPBACK if _one_node(processes) else socket.gethostname()
        processes.store.set(f"{KEY}/{processes.rank}", f"{host} {listener.address[1]} {secret}")
        peers = []
        for _ in range(processes.size - processes.rollout_ranks):
            connection = listener.accept()
            peers.append(Peer(connection.recv(), connection, inbox))
    return sorted(peers, key=lambda peer: peer.rank)


def connect(processes: RunProcesses, rank: int, inbox: "SimpleQueue[tuple[Peer, Any]]") -> Peer:
    """Connect this rank, which trains, to `rank`, which generates and may not listen yet."""
    host, port, secret = processes.store.get(f"{KEY}/{rank}").decode().split()
    connection = Client((host, int(port)), authkey=secret.encode())
    connection.send(processes.rank)
    return Peer(rank, connection, inbox)


def _one_node(processes: RunProcesses) -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == str(processes.size)


def _address(processes: RunProcesses) -> str:
    return LOOPBACK if _one_node(processes) else ""
