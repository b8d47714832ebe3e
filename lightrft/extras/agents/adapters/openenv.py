"""Environments of OpenEnv as programs of episodes: `--environment openenv:http://host:8000`.

Each connection to the server's WebSocket has a separate environment. `{"type": "reset", "data":
row}` and `{"type": "step", "data": action}` are answered with an observation, a reward and
whether it is the last one, or with an error.
"""

import json
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from lightrft.extras.agents.endpoint.protocol import EndpointModel
from lightrft.extras.agents.session import EpisodeProgram, Session

MAX_MESSAGE_BYTES = 100 * 2**20
"""Largest size of a message in bytes."""
NOT_AN_ACTION = "VALIDATION_ERROR"
"""Code of the error for an action that does not fit the environment's schema."""

Step = tuple[str, float | None, bool]
"""(Observation that the model reads, reward, True at the end)."""


def program(url: str, served: EndpointModel | None) -> EpisodeProgram:
    """Return the program whose episodes use the environments of a server."""
    scheme, _, rest = (url if "://" in url else f"http://{url}").partition("://")
    address = f"{scheme.replace('http', 'ws', 1)}://{rest.rstrip('/')}/ws"

    async def play(session: Session, row: dict[str, Any]) -> None:
        try:
            socket = await connect(address, max_size=MAX_MESSAGE_BYTES)
        except (OSError, WebSocketException) as error:
            raise ConnectionError(f"no OpenEnv server answers at {address}: {error}") from error

        async with socket:
            observation, _, done = await _request(socket, "reset", row)
            while not done:
                turn = await session.turn(observation)
                observation, reward, done = await _request(socket, "step", action(turn.text))
                if reward is not None:
                    session.reward(reward)
                done = done or turn.is_last

    return play


def action(text: str) -> dict[str, Any]:
    """Return the action of a turn: its text as a JSON object, or else `{"message": text}`."""
    with suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    return {"message": text}


def observation_text(observation: dict[str, Any]) -> str:
    """Return what the model reads of an observation.

    It is the text of an observation that is nothing else, or else the JSON without metadata.
    """
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    values = [*fields.values()]
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(fields, ensure_ascii=False)


async def _request(socket: ClientConnection, kind: str, data: dict[str, Any]) -> Step:
    """Return the reply to a message.

    An action that does not fit is answered with the errors, for the model to read.
    """
    with suppress(ConnectionClosed):  # a server without a free environment says so, then closes
        await socket.send(json.dumps({"type": kind, "data": data}))
    reply = json.loads(await socket.recv())["data"]
    if "observation" in reply:
        return observation_text(reply["observation"]), reply["reward"], reply["done"]

    if kind == "step" and reply.get("code") == NOT_AN_ACTION:
        problems = [{"field": each["loc"], "problem": each["msg"]} for each in reply["errors"]]
        return json.dumps({"error": problems}), None, False

    raise RuntimeError(f"OpenEnv: {reply.get('message')} ({reply.get('code')})")
