"""A server that is asked over HTTP, and asked again while it is away or busy."""

import os
from typing import Any

import httpx
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

SECONDS = 600.0
"""The longest that one request may take."""
ATTEMPTS = 8
"""Of a request to a server that is away or busy; half a minute in all."""


class Endpoint:
    """Speaks JSON. Everything that goes wrong is a ValueError which begins with the user's flag."""

    def __init__(self, flag: str, url: str, key: str):
        """`key`: the environment variable whose value goes with every request, so that no secret is in a configuration."""
        self.url, self.named = url.rstrip("/"), f"{flag} {url.rstrip('/')}"
        secret = os.environ.get(key)
        self._client = httpx.Client(timeout=SECONDS, headers={"Authorization": f"Bearer {secret}"} if secret else {})

    def ask(self, method: str, path: str = "", request: Any = None) -> Any:
        """The answer to `request` at `path` below the address. Several threads may ask at once."""
        attempts = Retrying(
            retry=retry_if_exception(_may_pass),
            wait=wait_exponential(multiplier=0.2, max=15),
            stop=stop_after_attempt(ATTEMPTS),
            reraise=True,
        )
        asked = f"{method} {path}".strip()
        try:
            return attempts(self._ask_once, method, path, request)
        except httpx.HTTPStatusError as error:
            code, said = error.response.status_code, error.response.text[:300]
            raise ValueError(f"{self.named}: {asked} ended with {code}: {said}") from error
        except httpx.HTTPError as error:
            raise ValueError(f"{self.named}: {asked}: {type(error).__name__}: {error}") from error

    def _ask_once(self, method: str, path: str, request: Any) -> Any:
        response = self._client.request(method, f"{self.url}/{path}" if path else self.url, json=request)
        response.raise_for_status()
        try:
            return response.json()
        except ValueError as error:
            raise ValueError(f"{self.named} did not answer in JSON: {response.text[:300]}") from error


def _may_pass(error: BaseException) -> bool:
    """Whether asking again can help: the server is away, or says that it is busy or broken."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError)
