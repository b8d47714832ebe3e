"""The routes of the server, and the server of one episode on a loopback port."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightrft.extras.agents.endpoint import messages_api, protocol, responses_api
from lightrft.extras.agents.endpoint.parts import Body, Growth, Part, Stored, parts_of, pieces_of
from lightrft.extras.agents.endpoint.protocol import EndpointModel
from lightrft.extras.agents.history import reply
from lightrft.extras.agents.messages import COUNTED, Turn
from lightrft.extras.agents.session import Session
from lightrft.extras.http_server import (
    Refusal,
    answered,
    check_key,
    content_of,
    listening,
    server_settings,
)

T = TypeVar("T")
EVENTS = "text/event-stream"
Sessions = Callable[[str], AbstractContextManager[Session]]
"""Function from the `x-session-id` of a request, which may be empty, to its episode's context."""

Handler = Callable[[Request], Awaitable[Response]]
Growing = AsyncGenerator[Growth, None]
Take = Callable[[Session, Body], Growing]
"""Function that asks for the turn of a request, and yields it as it grows, or once."""
Events = Callable[[AsyncIterator[Growth], Body], AsyncIterator[str]]
"""Function that yields the events of a turn as it grows, for a request."""
Problem = Callable[[str, str], Body]
"""Function from a message and a code to the body of an error."""
Log = Callable[[Request, int, str], None]
Record = Callable[[str, str, int, str, int | None], None]
"""Function of the arguments of Exchanged."""


class Api(NamedTuple):
    """A protocol of chats."""

    chat_body: Callable[[Body, Stored], Body]
    """Function from a request, and the messages of earlier responses, to a chat completion's.

    `kept` are the messages to keep with the reply, or None.
    """
    reply: Callable[[Turn, list[Part], EndpointModel, Body], Body]
    events: Events
    problem: Problem = protocol.problem
    thoughts_apart: bool = True


CHAT_APIS = {
    "/v1/chat/completions": Api(
        protocol.chat_body, protocol.chat_reply, protocol.events, thoughts_apart=False
    ),
    "/v1/responses": Api(responses_api.chat_body, responses_api.reply, responses_api.events),
    "/v1/messages": Api(
        messages_api.chat_body, messages_api.reply, messages_api.events, messages_api.problem
    ),
}
NO_ROOM = (
    "a limit of the episode leaves no room for a turn (--max_turns, --generate_max_len,"
    " --episode_minutes)"
)


class Address(NamedTuple):
    """Address of an episode for clients: AsyncOpenAI(base_url=address.url, api_key=address.key)."""

    url: str
    key: str


def application(
    sessions: Sessions,
    served: EndpointModel,
    key: str = "",
    *,
    log: Log | None = None,
    record: Record | None = None,
) -> Starlette:
    """Return the application that answers requests with turns of episodes.

    With a key, requests without it are refused. `log` gets each request with the status of the
    answer, and a text about it. `record` gets each exchange.
    """
    routes = _Routes(sessions, served, key, log, record)
    count = routes.handler(routes.count_tokens, None, messages_api.problem)
    posts = {
        "/v1/completions": routes.handler(routes.complete, protocol.events),
        "/inference/v1/generate": routes.handler(routes.generate, None),
        "/v1/messages/count_tokens": count,
    }
    for path, api in CHAT_APIS.items():
        posts[path] = routes.handler(partial(routes.chat, api), api.events, api.problem)

    return Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/v1/models", routes.models),
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
        ]
    )


@dataclass(frozen=True)
class _Routes:
    """Handlers of requests. See application() for the fields."""

    sessions: Sessions
    served: EndpointModel
    key: str
    log: Log | None
    record: Record | None

    def handler(
        self, take: Take, events: Events | None, problem: Problem = protocol.problem
    ) -> Handler:
        """Return a handler that answers with the turn that `take` asks for, and logs it.

        Without `events` no answer is a stream.
        """

        def refuse(refusal: Refusal) -> Response:
            content = problem(refusal.message, refusal.code)
            return JSONResponse(content, refusal.status, refusal.headers)

        async def handle(request: Request) -> Response:
            began = time.monotonic()
            request.state.content = b""
            request.state.turn = None
            response, about = await answered(self._answer(request, take, events, problem), refuse)
            if self.record is not None:
                sent, reply = request.state.content.decode(errors="replace"), bytes(response.body)
                status, turn = response.status_code, request.state.turn
                self.record(request.url.path, sent, status, reply.decode(), turn)
            if self.log is not None:
                seconds = time.monotonic() - began
                self.log(request, response.status_code, f"{seconds:.2f} s{about}")

            return response

        return handle

    async def _answer(
        self, request: Request, take: Take, events: Events | None, problem: Problem
    ) -> Response:
        """Return the turn that a request asks for. Raises Refusal if there is none."""
        presented = request.headers.get("x-api-key", "")
        if presented != self.key:  # a client may have another key for another API, too
            presented = request.headers.get("authorization", "").removeprefix("Bearer ")
        check_key(presented, self.key, "this server's: it may be an earlier episode's")

        # A mistake in a request costs that request alone: others go on.
        request.state.content = await content_of(request, self.served.max_request_bytes)
        body = protocol.read_body(request.state.content)
        async with AsyncExitStack() as context:
            session = context.enter_context(self.sessions(request.headers.get("x-session-id", "")))
            growth = take(session, body)
            context.push_async_callback(growth.aclose)
            # A refusal still has a status of its own.
            first = await _unless_left(request, anext(growth))
            turn = first.turn
            if not (turn.token_ids or turn.finish_reason == COUNTED):
                raise Refusal(400, NO_ROOM, "context_length_exceeded")
            request.state.turn = turn.number if turn.token_ids else None
            if events is None or not body.get("stream"):
                return JSONResponse(first.reply)

            said = events(_joined(first, growth), body)
            if turn.finish_reason:
                return Response("".join([each async for each in said]), media_type=EVENTS)
            streamed = _all_events(said, context.pop_all(), problem)
            return StreamingResponse(streamed, media_type=EVENTS)

    async def chat(self, api: Api, session: Session, body: Body) -> Growing:
        chat = api.chat_body(body, session.stored)
        messages, options = self._read_chat(session, chat)
        # What a reply has for each token is sent with the complete turn.
        whole = not body.get("stream") or body.get("logprobs") or body.get("return_token_ids")
        before: list[Part] = []
        async for turn in session.growing_chat(messages, in_pieces=not whole, **options):
            parts = parts_of(turn, chat, apart=api.thoughts_apart)
            content = api.reply(turn, parts, self.served, chat)
            if turn.finish_reason and chat["kept"]:
                session.stored[content["id"]] = [*chat["kept"], reply(turn)]
            pieces = pieces_of(before, parts, complete=bool(turn.finish_reason))
            yield Growth(turn, content, [*pieces])
            before = parts

    async def count_tokens(self, session: Session, body: Body) -> Growing:
        chat = messages_api.chat_body(body, session.stored)
        messages, options = self._read_chat(session, chat)
        turn = await session.chat(messages, **options, counts=True)
        yield Growth(turn, {"input_tokens": len(turn.context_ids)}, [])

    def _options(self, session: Session, body: Body) -> dict[str, Any]:
        """Return the sampling options of a request, without those that the run overrides."""
        replaced = protocol.overridden(body, self.served)
        session.ended.overridden.update(f"{name} {value!r:.40}" for name, value in replaced.items())
        kept = {name: value for name, value in body.items() if name not in replaced}
        return protocol.read_options(kept, self.served)

    def _read_chat(self, session: Session, body: Body) -> tuple[list[Any], dict[str, Any]]:
        """Return the messages of a request, and the options of Session.chat()."""
        options = self._options(session, body)
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise ValueError("the request needs a list of messages")
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        return messages, {**options, "tools": tools or None}

    async def complete(self, session: Session, body: Body) -> Growing:
        options = self._options(session, body)
        prompt = protocol.read_prompt(body.get("prompt"))
        take = session.complete if isinstance(prompt, str) else session.generate
        turn = await take(prompt, **options)
        yield Growth(turn, protocol.completion_reply(turn, self.served, body), [])

    async def generate(self, session: Session, body: Body) -> Growing:
        parameters = body.get("sampling_params") or {}
        if not isinstance(parameters, dict):
            raise ValueError("sampling_params is an object")
        options = self._options(session, parameters | {"model": body.get("model")})
        turn = await session.generate(protocol.read_token_ids(body.get("token_ids")), **options)
        yield Growth(turn, protocol.generate_reply(turn), [])

    async def models(self, request: Request) -> Response:
        return JSONResponse(protocol.models(self.served))

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ready"})


async def _unless_left(request: Request, answer: Awaitable[T]) -> T:
    """Return what is awaited. Raises ClientDisconnect, and ends it, if the client leaves before."""

    async def wait_until_left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answered = asyncio.ensure_future(answer)
    left = asyncio.create_task(wait_until_left())
    try:
        await asyncio.wait((answered, left), return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            return answered.result()
        raise ClientDisconnect
    finally:
        for task in (answered, left):
            task.cancel()
        await asyncio.gather(answered, left, return_exceptions=True)


async def _joined(first: Growth, growth: Growing) -> Growing:
    yield first
    async for each in growth:
        yield each


async def _all_events(
    events: AsyncIterator[str], context: AsyncExitStack, problem: Problem
) -> AsyncIterator[str]:
    """Yield events, and leave the context after them; an error is the last event."""
    try:
        async with context:
            async for event in events:
                yield event
    except ValueError as error:
        yield f"event: error\n{protocol.event(problem(str(error), 'invalid_request'))}"


@asynccontextmanager
async def serving(session: Session, served: EndpointModel) -> AsyncIterator[Address]:
    """Serve an episode on a loopback port, while the context is open.

    Its key keeps out requests of earlier episodes.
    """
    key = secrets.token_hex(16)
    listener = listening("127.0.0.1", 0)
    record = session.record if served.records else None
    app = application(lambda _: nullcontext(session), served, key, record=record)

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
