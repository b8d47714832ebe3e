"""Open the address of a server on one rank, and answer requests there in a thread."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import uvicorn
from starlette.applications import Starlette

from lightrft.config.sections import ServerSection
from lightrft.extras.agents.endpoint.server import listening, server_settings
from lightrft.models.parallel.collectives import Axis

NUM_THREADS = 256
"""Number of threads for requests that wait until a rank reads them."""


def listener_of_rank_0(section: ServerSection, world: Axis) -> socket.socket | None:
    """Return a socket that listens at the address on rank 0; None on the other ranks.

    Raise ValueError on all ranks if the address is in use.
    """
    listener = None
    problem = ""
    if world.rank == 0:
        try:
            listener = listening(section.host, section.port)
        except OSError as error:
            problem = f"--host {section.host} --port {section.port}: {error.strerror or error}"

    if problem := world.broadcast(problem):
        raise ValueError(problem)
    return listener


def start_answering(app: Starlette, listener: socket.socket) -> str:
    """Answer requests in a thread with an event loop of its own; return the address."""

    async def answer() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS))
        with suppress(asyncio.CancelledError):
            await uvicorn.Server(server_settings(app)).serve(sockets=[listener])

    threading.Thread(target=lambda: asyncio.run(answer()), name="server", daemon=True).start()
    host, port = listener.getsockname()[:2]
    return f"http://{host}:{port}"
