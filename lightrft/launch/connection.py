"""JSON objects, one per line, over a TCP connection that notices when the other end is gone."""

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
"""Seconds without an answer from the other machine's kernel after which a connection counts as lost. A process that dies closes
its connections at once, whatever kills it; this is for machines and networks that go down."""
PENDING = 65536
"""Bytes that may wait for a receiver who does not read, what comes after them is dropped; and the longest line."""
FIRST = 1024
"""The longest line of somebody who has not shown yet that it belongs to the run."""

_open: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


class ConnectionLost(Exception):
    """The other end closed the connection, died, or cannot be reached any more."""


class Connection:
    """Neither sending nor receiving blocks. Any thread may send, one receives."""

    def __init__(self, connected: socket.socket, *, longest: int = PENDING):
        """A line of more than `longest` bytes ends the connection."""
        connected.setblocking(False)
        _notice_loss(connected)
        keep_from_children(connected)
        self.socket, self.longest = connected, longest
        self._lock = threading.Lock()
        self._unsent = self._unread = b""

    def send(self, message: Message) -> None:
        """Whether it arrives is not known here: a lost connection shows in receive()."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            if len(self._unsent) < PENDING:
                self._unsent += line
            with suppress(OSError):
                self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def receive(self) -> Iterator[Message]:
        """Give the messages that arrived since the last call. ConnectionLost when no more can arrive."""
        try:
            data = self.socket.recv(PENDING)
        except BlockingIOError:
            return
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
        """Both ends, and who waits here, see the end."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


def keep_from_children(opened: socket.socket) -> None:
    """A forked child that inherits a connection would keep it open when this process dies."""
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
