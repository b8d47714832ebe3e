"""Send JSON objects over TCP, one per line, and notice when the other end is lost."""

import json
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

LOST_AFTER = 45
"""Seconds without a reply from the other machine's kernel until a connection counts as lost. A
process that dies closes all connections at once, whatever kills it; this limit is for failures of
machines and networks."""
PENDING = 65536
"""Maximum bytes of a line, and of messages to a receiver that does not read; more are dropped."""
MAX_FIRST_LINE = 1024
"""Maximum number of bytes of a line from a peer that has not been authenticated yet."""

_open: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


class ConnectionLost(Exception):
    """Loss of a connection: the other end closed it, died, or is unreachable."""


class Connection:
    """Non-blocking connection. Any thread may send; only one may receive."""

    def __init__(self, connected: socket.socket, *, longest: int = PENDING):
        """Wrap a connected socket; a line of more than `longest` bytes ends the connection."""
        connected.setblocking(False)
        _notice_loss(connected)
        keep_from_children(connected)
        self.socket = connected
        self.longest = longest
        self._lock = threading.Lock()
        self._unsent = self._unread = b""

    def send(self, message: Message) -> None:
        """Send a message without confirmation; receive() detects a lost connection."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            if len(self._unsent) < PENDING:
                self._unsent += line
            with suppress(OSError):
                self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def receive(self) -> Iterator[Message]:
        """Yield the messages that have arrived since the last call.

        Raises ConnectionLost if no more can arrive.
        """
        try:
            data = self.socket.recv(PENDING)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the other process was killed before it had read everything
            data = b""
        except OSError as error:
            raise ConnectionLost(error.strerror) from error

        if not data:
            raise ConnectionLost("connection closed")

        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            yield self._read(line)
        if len(self._unread) > self.longest:
            raise ConnectionLost("a line without an end")

    def _read(self, line: bytes) -> Message:
        if len(line) > self.longest:
            raise ConnectionLost(f"a line of {len(line)} bytes")
        try:
            return json.loads(line)
        except RecursionError as error:
            raise ConnectionLost("a line of brackets") from error

    def shut(self) -> None:
        """Shut the connection down; this wakes both ends and any thread that waits on it."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


def keep_from_children(opened: socket.socket) -> None:
    """Close the socket in forked children, so that it ends with this process."""
    _open.add(opened)


def _close_in_child() -> None:
    for inherited in list(_open):
        inherited.close()


os.register_at_fork(after_in_child=_close_in_child)


def _notice_loss(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_AFTER // 3)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, LOST_AFTER // 6)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_AFTER * 1000)
