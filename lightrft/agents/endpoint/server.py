"""The routes of the server, and the server of one episode on a loopback port of its own process."""

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from typing import NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightrft.agents.endpoint import protocol
from lightrft.agents.endpoint.protocol import Body, EndpointModel
from lightrft.agents.messages import Turn
from lightrft.agents.session import Session

Sessions = Callable[[str], AbstractContextManager[Session]]
"""Function from the `x-session-id` of a request, which may be empty, to the context of its episode."""

Handler = Callable[[Request], Awaitable[Response]]


class Address(NamedTuple):
    """Address to which clients of an episode send their requests: AsyncOpenAI(base_url=address.url, api_key=address.key)."""

    url: str
    key: str


def application(sessions: Sessions, served: EndpointModel, key: str = "") -> Starlette:
    """Return the application that answers requests with turns of episodes. With a key, requests without it are refused."""

    def answers(take: Callable[[Session, Body], Awaitable[tuple[Turn, Body]]], *, streams: bool = True) -> Handler:
        async def route(request: Request) -> Response:
            presented = request.headers.get("authorization", "").removeprefix("Bearer ")
            if key and not hmac.compare_digest(presented.encode(), key.encode()):
                message = "the key is not that of this server, or that of an earlier episode"
                return JSONResponse(protocol.problem(message, "invalid_api_key"), 401)
            try:
                body = json.loads(await request.body())
                if not isinstance(body, dict):
                    raise ValueError("the request is not a JSON object")
                with sessions(request.headers.get("x-session-id", "")) as session:
                    turn, reply = await take(session, body)
            except ValueError as error:
                return JSONResponse(protocol.problem(str(error)), 400)
            if not turn.token_ids:
                message = "a limit of the episode leaves no room for a turn (--max_turns, --generate_max_len, --episode_minutes)"
                return JSONResponse(protocol.problem(message, "context_length_exceeded"), 400)
            if streams and body.get("stream"):
                return StreamingResponse(protocol.events(reply, body), media_type="text/event-stream")
            return JSONResponse(reply)

        return route

    async def chat(session: Session, body: Body) -> tuple[Turn, Body]:
        options, messages = protocol.read_options(body, served), body.get("messages")
        if not isinstance(messages, list):
            raise ValueError("the request needs a list of messages")
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        turn = await session.chat(messages, tools=tools or None, **options)
        return turn, protocol.chat_reply(turn, len(session.turns), served, body)

    async def complete(session: Session, body: Body) -> tuple[Turn, Body]:
        options, prompt = protocol.read_options(body, served), body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            (prompt,) = prompt
        if isinstance(prompt, str):
            turn = await session.complete(prompt, **options)
        else:
            turn = await session.generate(_token_ids(prompt), **options)
        return turn, protocol.completion_reply(turn, len(session.turns), served, body)

    async def generate(session: Session, body: Body) -> tuple[Turn, Body]:
        options = protocol.read_options(body.get("sampling_params") or {}, served)
        turn = await session.generate(_token_ids(body.get("token_ids")), **options)
        return turn, protocol.generate_reply(turn, len(session.turns))

    async def models(request: Request) -> Response:
        return JSONResponse(protocol.models(served))

    return Starlette(routes=[
        Route("/v1/models", models),
        Route("/v1/chat/completions", answers(chat), methods=["POST"]),
        Route("/v1/completions", answers(complete), methods=["POST"]),
        Route("/inference/v1/generate", answers(generate, streams=False), methods=["POST"]),
    ])  # fmt: skip


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens; 0: at any free port. Raises OSError for an address that is in use."""
    listener = socket.create_server((host, port))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else the body of a reply waits 40 ms for the client
    return listener


def server_settings(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(app, log_level="error", access_log=False, lifespan="off")


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not value or not all(isinstance(token, int) for token in value):
        raise ValueError("the prompt is a text or a list of token ids")
    return value


@asynccontextmanager
async def serving(session: Session, served: EndpointModel) -> AsyncIterator[Address]:
    """Serve an episode on a loopback port, while the context is open. Its key keeps out requests of earlier episodes."""
    key = secrets.token_hex(16)
    listener = listening("127.0.0.1", 0)
    app = application(lambda _: nullcontext(session), served, key)
    server = uvicorn.Server(server_settings(app))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.001)
        yield Address(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", key)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        listener.close()
