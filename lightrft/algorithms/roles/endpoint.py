"""Client of an HTTP server that repeats a request while the server is unreachable or busy."""

import asyncio
import os
import threading
import time
from typing import Any

import httpx
from loguru import logger
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from lightrft.config.references import address_problem

REQUEST_SECONDS = 600.0
"""Longest duration of one request, from the connection to the last byte."""
CONNECT = 30.0
"""Longest duration of connecting; then the attempt is repeated as for an unreachable server."""
AWAY_SECONDS = 300.0
"""Longest time that a server may be away or busy."""
WARN_AFTER = 10.0
"""Seconds of an outage before it is logged, once."""


class Endpoint:
    """Client for JSON requests. Every failure is a ValueError that begins with the user's flag."""

    def __init__(
        self,
        flag: str,
        url: str,
        key: str,
        *,
        seconds: float = REQUEST_SECONDS,
        patience: float = AWAY_SECONDS,
    ):
        """Set up the client.

        `key` is an environment variable. Its value goes with every request, so no secret is in a
        configuration.
        """
        if problem := address_problem(flag, url, key):
            raise ValueError(problem)

        self.url = url.rstrip("/")
        self.named = f"{flag} {url.rstrip('/')}"
        self.seconds = seconds
        self.patience = patience
        secret = os.environ.get(key, "")
        user, separator, password = secret.partition(":")
        self._settings = {
            # a slow trickle of bytes would never exceed other limits
            "timeout": httpx.Timeout(None, connect=CONNECT),
            "headers": {"Authorization": f"Bearer {secret}"} if secret and not separator else {},
            "auth": httpx.BasicAuth(user, password) if separator else None,
        }
        self._process = 0
        self._lock = threading.Lock()

    def ask(self, method: str, path: str = "", request: Any = None) -> Any:
        """Return the answer to `request` at `path` below the address.

        Several threads may call this at once.
        """
        warned = False

        def warn(state: Any) -> None:
            """Log once for each outage that the run is waiting."""
            nonlocal warned
            if not warned and state.seconds_since_start + state.next_action.sleep > WARN_AFTER:
                warned = True
                self._warn(state.outcome.exception())

        attempts = Retrying(
            retry=retry_if_exception(_may_pass),
            wait=wait_exponential(multiplier=0.2, max=15),
            stop=stop_after_delay(self.patience),
            before_sleep=warn,
            reraise=True,
        )

        route = f"{method} {path}".strip()
        began = time.monotonic()
        try:
            return attempts(self._ask_once, method, path, request)
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            body = error.response.text[:300]
            raise ValueError(
                f"{self.named}: {route} ended with {code}: {body}{_duration(began)}"
            ) from error
        except TimeoutError as error:
            raise ValueError(
                f"{self.named}: {route} sent no complete response within {self.seconds:.0f}"
                f" s{_duration(began)}"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(
                f"{self.named}: {route}: {type(error).__name__}: {error}{_duration(began)}"
            ) from error

    def _ask_once(self, method: str, path: str, request: Any) -> Any:
        with self._lock:
            if self._process != os.getpid():  # a fork has no threads
                self._connect()

        answer = self._answer(method, f"{self.url}/{path}" if path else self.url, request)
        response = asyncio.run_coroutine_threadsafe(answer, self._loop).result()
        response.raise_for_status()

        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.named} did not respond with JSON: {response.text[:300]}"
            ) from error

    def _connect(self) -> None:
        self._process = os.getpid()
        self._client = httpx.AsyncClient(**self._settings)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True).start()

    async def _answer(self, method: str, url: str, request: Any) -> httpx.Response:
        async with asyncio.timeout(self.seconds):
            return await self._client.request(method, url, json=request)

    def _warn(self, error: BaseException) -> None:
        logger.warning(
            f"{self.named} is unreachable or busy ({error}): retrying for at most"
            f" {self.patience:.0f} s (--server_minutes)"
        )


def _duration(began: float) -> str:
    return f" (after {time.monotonic() - began:.0f} s of repeated requests, see --server_minutes)"


def _may_pass(error: BaseException) -> bool:
    """Return True if repeating the request can help.

    The server is unreachable, or reports that it is busy or broken.
    """
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError)
