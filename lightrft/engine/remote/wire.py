"""Messages between the ranks that train and the ranks that generate."""

import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from lightrft.core.engine import Request
from lightrft.core.samples import Completion, Drafts
from lightrft.engine.media import Clip, Video
from lightrft.engine.remote.codec import Codec
from lightrft.engine.remote.door import STORE_PREFIX, Door, enter, local_address
from lightrft.engine.requests import Sampling
from lightrft.models.parallel.processes import RunProcesses

PRETRAIN = f"{STORE_PREFIX}/pretrain"
"""Key of the folder that the engines start from."""
ADAPTERS_KEY = f"{STORE_PREFIX}/adapters"
"""Key of the adapters that the engines should hold beside the weights; empty without any."""
HOLDS_ADAPTERS = f"{STORE_PREFIX}/holds_adapters"
"""Key that says whether the engines hold them; empty if they take merged weights."""
CAPACITY = f"{STORE_PREFIX}/capacity"
"""Key of the number of samples that an engine decodes at the same time."""


@dataclass(frozen=True, slots=True)
class Generate:
    """One call's requests for one engine.

    All training ranks make the same calls, and each sends some requests to every engine. A negative
    number marks a call that one rank makes alone.
    """

    call: int
    requests: list[tuple[int, Request]]
    """(index in the rank's call, request) of each request."""
    version: int
    """Weights that the engine must have loaded before it begins a call of a single rank."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Completions of a request of a call."""

    call: int
    index: int
    completions: list[Completion]


@dataclass(frozen=True, slots=True)
class Abort:
    """Asks to end the requests of a call; each is answered with the completions so far."""

    call: int


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Announces a weight stream, between the call `after` and the next one."""

    version: int
    after: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Says that the run, or the connection, has ended."""


CONTENTS = (Request, Sampling, Completion, Drafts, Video, Clip)
CODEC = Codec(Generate, Finished, Abort, LoadWeights, Closed, *CONTENTS)


@dataclass(eq=False, slots=True)
class Peer:
    """Connection to a process of the other side.

    A thread receives messages at once, so that the other side never waits.
    """

    rank: int
    connection: socket.socket
    inbox: "SimpleQueue[tuple[Peer, Any]]"
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(
            target=self._receive, name=f"messages of rank {self.rank}", daemon=True
        )
        self._thread.start()

    def send(self, message: Any) -> None:
        for piece in CODEC.dump(message):
            self.connection.sendall(piece)

    def close(self) -> None:
        """Close the connection; what was sent still arrives."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def _receive(self) -> None:
        """Pass messages on until the other side closes; the last one is a single `Closed`."""
        message: Any = None
        with self.connection.makefile("rb") as file:
            while not isinstance(message, Closed):
                try:
                    message = CODEC.load(lambda size: _read(file, size))
                except (OSError, EOFError):  # the watchdog names a rank that has died
                    message = Closed()
                self.inbox.put((self, message))


def _read(file: Any, size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise EOFError
    return content


def accept(processes: RunProcesses, inbox: "SimpleQueue[tuple[Peer, Any]]") -> list[Peer]:
    """Listen on this generating rank, and accept all training ranks, in rank order."""
    secret = secrets.token_hex(16)
    address = local_address(processes)
    door = Door(address, secret)
    processes.store.set(
        f"{STORE_PREFIX}/{processes.rank}",
        f"{address or socket.gethostname()} {door.port} {secret}",
    )
    connections = door.admit(processes.size - processes.rollout_ranks)
    return [Peer(rank, connections[rank], inbox) for rank in sorted(connections)]


def connect(processes: RunProcesses, rank: int, inbox: "SimpleQueue[tuple[Peer, Any]]") -> Peer:
    """Connect this training rank to a rank that generates and may not listen yet."""
    host, port, secret = processes.store.get(f"{STORE_PREFIX}/{rank}").decode().split()
    return Peer(rank, enter(host, int(port), secret, processes.rank), inbox)
