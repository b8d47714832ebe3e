"""Run agents that talk to the model as a client of an OpenAI-compatible server."""

import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from lightrft.extras.agents.endpoint.protocol import EndpointModel
from lightrft.extras.agents.endpoint.server import serving
from lightrft.extras.agents.session import Session

Agent = Callable[[AsyncOpenAI, dict[str, Any]], Awaitable[float | Mapping[str, float] | None]]
"""Function from a client and the columns of a row to the reward of the episode, or of each role."""
CERTIFICATES = ssl.create_default_context()
"""Loaded once, before the workers are forked: loading them takes a client longer than a turn."""


async def converse(
    agent: Agent, session: Session, row: dict[str, Any], served: EndpointModel
) -> None:
    """Run an episode of an agent.

    If the agent raises after a limit of the episode refused its request, the episode has ended
    there.
    """
    async with (
        serving(session, served) as address,
        DefaultAsyncHttpxClient(verify=CERTIFICATES) as http,
        AsyncOpenAI(
            base_url=address.url, api_key=address.key, max_retries=0, timeout=None, http_client=http
        ) as client,
    ):
        try:
            reward = await agent(client, row)
        except Exception:
            # Clients raise for a refused request, and the agent has made no mistake then.
            if not session.limited:
                raise
            return

    if reward is not None:
        session.reward(reward)
