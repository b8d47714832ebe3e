"""Requests whose results clients ask for later, and the queue where they wait."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response

from lightrft.extras.http_server import Refusal
from lightrft.extras.tinker.records import RequestRefused, SamplePrompt

KEPT_SECONDS = 900.0
"""How long the result of a request can be asked for."""
LONG_POLL_SECONDS = 25.0
"""How long a question for a result waits; the SDK gives up after 45 seconds."""
MOST_WAITING = 4096
"""Requests that wait at the same time; others are asked to come again."""
PROTOBUF = "application/x-protobuf"


@dataclass(slots=True)
class Job:
    """Work for all ranks, in the order of the requests."""

    verb: str
    """Method of TinkerWorker."""
    arguments: dict[str, Any]
    result: Future[Any] = field(default_factory=Future)


class Jobs:
    """The queue of jobs. The server's thread adds to it, and the loop of rank 0 takes from it."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()

    def add(self, verb: str, **arguments: Any) -> Future[Any]:
        job = Job(verb, arguments)
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                raise Refusal(429, f"{MOST_WAITING} requests wait already")
            self._waiting.append(job)
            self._changed.notify()
        return job.result

    def take(self, seconds: float) -> list[Job]:
        """Return the next job, with all prompts for the same weights that follow it at once."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, seconds):
                return []
            first = self._waiting.popleft()
            prompt: SamplePrompt | None = first.arguments.get("prompt")
            others = prompt is not None and not prompt.scored
            return [first, *(self._prompts(prompt.weights) if others else [])]

    def prompts(self, weights: Hashable) -> list[Job]:
        """Return the prompts for these weights at the head of the queue."""
        with self._changed:
            return self._prompts(weights)

    def _prompts(self, weights: Hashable) -> list[Job]:
        found: list[Job] = []
        while self._waiting:
            prompt: SamplePrompt | None = self._waiting[0].arguments.get("prompt")
            if prompt is None or prompt.weights != weights or prompt.scored:
                break
            found.append(self._waiting.popleft())
        return found


Encode = Callable[[Any], bytes | dict[str, Any]]
"""Function that writes a result: bytes of protobuf, or an object."""


class Promises:
    """Results by the id of the request. A request that is sent again is not done again."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Future[Any], Encode]] = {}
        self._ended: deque[tuple[float, str]] = deque()
        """Requests that have ended, in this order, with the time."""

    def add(
        self, request_id: str, begin: Callable[[], Future[Any]], encode: Encode
    ) -> dict[str, str]:
        """Begin a request, unless one with this id has begun; return what names the promise."""
        self._forget_old()
        if request_id not in self._known:
            result = begin()
            self._known[request_id] = result, encode
            result.add_done_callback(lambda _: self._ended.append((time.monotonic(), request_id)))
        return {"request_id": request_id}

    async def answer(self, request_id: str) -> Response:
        """Wait a moment for a result."""
        if request_id not in self._known:
            return JSONResponse({"detail": f"there is no request {request_id!r:.100}"}, 410)

        result, encode = self._known[request_id]
        waiting = asyncio.wrap_future(result)
        # asyncio logs the errors that nobody looks at with a traceback.
        waiting.add_done_callback(asyncio.Future.exception)
        done, _ = await asyncio.wait({waiting}, timeout=LONG_POLL_SECONDS)
        if not done:
            again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JSONResponse(again, 408)

        error = result.exception()
        if error is not None:
            of_the_user = isinstance(error, RequestRefused | ValueError)
            category = "user" if of_the_user else "server"
            return JSONResponse({"error": str(error), "category": category})

        answer = encode(result.result())
        if isinstance(answer, bytes):
            return Response(answer, media_type=PROTOBUF)
        return JSONResponse(answer)

    def _forget_old(self) -> None:
        before = time.monotonic() - KEPT_SECONDS
        while self._ended and self._ended[0][0] < before:
            del self._known[self._ended.popleft()[1]]
