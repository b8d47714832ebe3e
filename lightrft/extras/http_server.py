"""Share the address, the limits of requests and the refusals between all servers of this program."""

import asyncio
import hmac
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import uvicorn
from loguru import logger
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from lightrft.config.sections import ServerSection
from lightrft.models.parallel.collectives import Axis

HEAD_SECONDS = 30.0
"""Time limit for the head of a request, from the connection or from the first byte."""
BODY_SECONDS = 60.0
"""Time limit for the body of a request."""
LONGEST_REFUSAL = 2000
"""Characters of a refusal's message; a client may have sent most of them."""
MAX_REQUEST = 64 << 20
"""Number of bytes of the largest request of a server that computes."""
POLL_SECONDS = 0.5
"""Longest time between two looks of all ranks at signals, while there are no requests."""
NUM_THREADS = 256
"""Number of threads for requests that wait until a rank reads them."""


@dataclass(eq=False)
class Refusal(Exception):
    """Raised for a request that is not done, with the status of HTTP, a message and a code."""

    status: int
    message: str
    code: str = "invalid_request"

    @property
    def headers(self) -> dict[str, str] | None:
        """Return the headers of the answer: what has not arrived yet is read no more."""
        return {"connection": "close"} if self.status in (408, 413) else None


def check_key(presented: str, key: str, owner: str) -> None:
    """Raise Refusal for another key; an empty `key` is none. Takes constant time, against guesses."""
    if key and not hmac.compare_digest(presented.encode(errors="replace"), key.encode()):
        raise Refusal(401, f"the API key is not {owner}", "invalid_api_key")


async def answered(
    answer: Awaitable[Response], refuse: Callable[[Refusal], Response]
) -> tuple[Response, str]:
    """Return the answer to a request, or why there is none, and a few words about it for a log.

    A mistake in the server costs one request.
    """
    try:
        return await answer, ""
    except ClientDisconnect:
        return Response(status_code=400), ": the client has left"
    except Refusal as error:
        return refuse(error), ""
    except ValueError as error:
        return refuse(Refusal(400, str(error)[:LONGEST_REFUSAL])), ""
    except RecursionError:
        return refuse(Refusal(400, "the request is JSON of too many brackets")), ""
    except Exception as error:
        logger.exception("a request has failed")
        message = f"the server failed at this request: {type(error).__name__}"
        return refuse(Refusal(500, message, "internal_error")), f": {error!r:.500}"


async def content_of(request: Request, longest: int) -> bytes:
    """Return the body of a request, and keep at most `longest` bytes of it.

    The rest is read all the same, because many clients read no answer before they have sent
    everything. Raises Refusal for a longer one, and for one that does not arrive in time.
    """
    content = bytearray()
    with suppress(TimeoutError):
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                if len(content) <= longest:
                    content += chunk
            if len(content) <= longest:
                return bytes(content)

    if len(content) <= longest:
        message = f"the request was not complete after {BODY_SECONDS:g} s"
        raise Refusal(408, message, "request_timeout")
    raise Refusal(413, f"the request has more than {longest} bytes", "request_too_large")


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens; 0: at any free port.

    Raises OSError for an address that is in use.
    """
    listener = socket.create_server((host, port))
    # Otherwise the body of a reply waits 40 ms for the client.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class ClientConnection(H11Protocol):
    """Connection of a client.

    It is closed if a request does not begin, or the head is not complete, in time.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waits = self.cycle is None or self.cycle.response_complete
        if self._deadline is not None and not waits:
            self._deadline.cancel()
            self._deadline = None
        elif self._deadline is None and waits:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)


def server_settings(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app, http=ClientConnection, ws="none", log_level="error", access_log=False, lifespan="off"
    )


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
