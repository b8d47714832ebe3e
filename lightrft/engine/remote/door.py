"""Connections of training ranks to a rank that generates, safe from unauthenticated peers.

A rank proves that it knows the run's secret, and so does the rank that it connects to. Other peers
are heard in separate threads for a few seconds, so they keep nobody waiting. Only the length and
the digest of what they send are looked at.
"""

import hmac
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from queue import SimpleQueue

import psutil

from lightrft.models.parallel.gloo import INTERFACE
from lightrft.models.parallel.processes import RunProcesses

STORE_PREFIX = "lightrft/rollout"
"""Prefix of the keys in the store of all processes."""
LOOPBACK = "127.0.0.1"
GREETING_SECONDS = 10.0
"""How long a connection may take to prove that it belongs to the run."""
CONNECT_SECONDS = 120.0
"""How long it may take to connect to a rank that has said that it listens."""
MOST_UNAUTHENTICATED = 64
"""Connections that are heard at the same time. Others are closed, and a rank of the run tries
again."""
NONCE = 32
CONNECT_REPLY = struct.Struct(f"!I{NONCE}s{NONCE}s")
"""Rank of the process that connects, a nonce, and the digest that only a process of the run knows.
"""


class Door:
    """A listening socket that lets in ranks of this run only."""

    def __init__(self, address: str, secret: str):
        """Listen at a free port of an address; an empty one stands for all addresses."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._secret = secret.encode()
        self._closed = False
        self._free = threading.BoundedSemaphore(MOST_UNAUTHENTICATED)
        self._admitted: SimpleQueue[tuple[int, socket.socket]] = SimpleQueue()
        threading.Thread(target=self._listen, name="door", daemon=True).start()

    def admit(self, number: int) -> dict[int, socket.socket]:
        """Wait until `number` ranks are connected, then stop listening; return them by rank."""
        connections: dict[int, socket.socket] = {}
        while len(connections) < number:
            rank, connection = self._admitted.get()
            if rank in connections:  # this rank has tried again
                connections[rank].close()
            connections[rank] = connection
        self.close()
        return connections

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # this wakes the thread
        self._listener.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or there are too many open files
                time.sleep(0.1)
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        try:
            deadline = time.monotonic() + GREETING_SECONDS
            # Both sides choose a nonce, so that no recorded answer can be used again.
            nonce = secrets.token_bytes(NONCE)
            connection.settimeout(GREETING_SECONDS)
            connection.sendall(nonce)

            rank, other, digest = CONNECT_REPLY.unpack(
                _receive(connection, CONNECT_REPLY.size, deadline)
            )
            expected = _digest(self._secret, b"comes", rank, nonce, other)
            if not hmac.compare_digest(digest, expected):
                raise ConnectionError("an unauthenticated peer")
            connection.sendall(_digest(self._secret, b"is met", rank, nonce, other))
            connection.settimeout(None)
            self._admitted.put((rank, connection))
        except OSError:
            connection.close()
        finally:
            self._free.release()


def enter(host: str, port: int, secret: str, rank: int) -> socket.socket:
    """Connect this rank to a door.

    Raises ConnectionError if the door cannot be reached, or another program answers."""
    deadline = time.monotonic() + CONNECT_SECONDS
    # The door may be full of other peers for a moment, so this rank tries again.
    while True:
        try:
            return _enter(host, port, secret.encode(), rank)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"rank {rank} on {socket.gethostname()} cannot connect to {host}:{port}, where"
                    f" a rank that generates (--rollout_ranks) listens: {error}. A firewall between"
                    " the nodes must allow these connections"
                ) from error
            time.sleep(0.5)


def _enter(host: str, port: int, secret: bytes, rank: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=GREETING_SECONDS)
    try:
        deadline = time.monotonic() + GREETING_SECONDS
        nonce = secrets.token_bytes(NONCE)
        other = _receive(connection, NONCE, deadline)
        connection.sendall(
            CONNECT_REPLY.pack(rank, nonce, _digest(secret, b"comes", rank, other, nonce))
        )

        expected = _digest(secret, b"is met", rank, other, nonce)
        if not hmac.compare_digest(_receive(connection, NONCE, deadline), expected):
            raise ConnectionError("another program answers")
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    except BaseException:
        connection.close()
        raise


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    content = b""
    while len(content) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.01))
        chunk = connection.recv(size - len(content))
        if not chunk or time.monotonic() > deadline:
            raise ConnectionError("it has ended, or takes too long")
        content += chunk
    return content


def _digest(secret: bytes, *fields: bytes | int) -> bytes:
    content = b"|".join(field if isinstance(field, bytes) else b"%d" % field for field in fields)
    return hmac.digest(secret, content, "sha256")


def local_address(processes: RunProcesses) -> str:
    """Return the address where other ranks reach this machine; empty if it is not known."""
    if processes.one_node:
        return LOOPBACK
    names = [os.environ[INTERFACE]] if INTERFACE in os.environ else []
    candidates = [entry.address for name in names for entry in psutil.net_if_addrs().get(name, ())]
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
        candidates += [str(entry[0]) for *_, entry in found]
    return next(filter(_can_listen, candidates), "")


def _can_listen(address: str) -> bool:
    """Return True for an address of this machine that other machines can reach."""
    if address.startswith(("127.", "::1", "fe80:", "169.254.")) or "%" in address:
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False
