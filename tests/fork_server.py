"""Loop of a process that has imported everything and is forked for each connection."""

import os
import select
import socket
from collections.abc import Callable
from typing import Any, NoReturn


def serve(
    listening: socket.socket, ended: Any, attend: Callable[[socket.socket], None]
) -> NoReturn:
    """Fork a process that attends to each connection, until `ended` can be read.

    It then waits for these processes. `ended` is a socket or a file descriptor that belongs to the
    process this one works for; `attend` does not return.
    """
    attendants: set[int] = set()
    while ended not in select.select([listening, ended], [], [])[0]:
        line = listening.accept()[0]
        attendants -= {
            attendant for attendant in attendants if os.waitpid(attendant, os.WNOHANG)[0]
        }
        attendant = os.fork()
        if not attendant:
            listening.close()
            attend(line)
        attendants.add(attendant)
        line.close()

    for attendant in attendants:
        os.waitpid(attendant, 0)
    os._exit(0)
