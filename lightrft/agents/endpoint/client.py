"""Agents that talk to the model as a client of an OpenAI-compatible server."""

from collections.abc import Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI

from lightrft.agents.endpoint.protocol import EndpointModel
from lightrft.agents.endpoint.server import serving
from lightrft.agents.session import Session

Agent = Callable[[AsyncOpenAI, dict[str, Any]], Awaitable[float | None]]
"""Function from a client and the columns of a row to the reward of the episode."""


async def converse(agent: Agent, session: Session, row: dict[str, Any], served: EndpointModel) -> None:
    """Run an episode of an agent. One that raises after a limit of the episode refused its request has ended there."""
    async with (
        serving(session, served) as address,
        AsyncOpenAI(base_url=address.url, api_key=address.key, max_retries=0, timeout=None) as client,
    ):
        try:
            reward = await agent(client, row)
        except Exception:
            if not session.limited:
                raise
            return
    if reward is not None:
        session.reward(reward)
