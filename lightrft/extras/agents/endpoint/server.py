"""The routes of the server, and the server of one episode on a loopback port."""

import asyncio
import hmac
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from lightrft.extras.agents.endpoint import messages_api, protocol, responses_api
from lightrft.extras.agents.endpoint.protocol import Body, EndpointModel
from lightrft.extras.agents.history import reply
from lightrft.extras.agents.messages import COUNTED, Turn
from lightrft.extras.agents.session import Session

T = TypeVar("T")
Sessions = Callable[[str], AbstractContextManager[Session]]
"""Function from the `x-session-id` of a request, which may be empty, to its episode's context."""

Handler = Callable[[Request], Awaitable[Response]]
Take = Callable[[Session, Body], Awaitable[tuple[Turn, Body]]]
"""Function that asks for the turn of a request, and returns it with the reply."""
Stream = Callable[[Session, Body], AsyncIterator[str]]
"""Function that yields the events of a turn while it grows."""
Events = Callable[[Body, Body], Iterator[str]]
"""Function that yields the events of a complete reply to a request."""
Problem = Callable[[str, str], Body]
"""Function from a message and a code to the body of an error."""
Log = Callable[[Request, int, str], None]
HEAD_SECONDS = 30.0
"""Time limit for the head of a request, from the connection or from the first byte."""
CLOSED = {"connection": "close"}
BODY_SECONDS = 60.0
"""Time limit for the body of a request."""


class Address(NamedTuple):
    """Address of an episode for clients: AsyncOpenAI(base_url=address.url, api_key=address.key)."""

    url: str
    key: str


class Refusal(Exception):
    """Raised with status, message, code and headers of the answer to a request without a turn."""


class RequestTooLarge(Exception):
    """Raised for a request with more bytes than a prompt of the model can have."""


class NoRoom(Exception):
    """Raised if a limit of the episode leaves no room for a turn."""


class RequestTooSlow(Exception):
    """Raised for a request that does not arrive in time."""


def application(
    sessions: Sessions, served: EndpointModel, key: str = "", *, log: Log | None = None
) -> Starlette:
    """Return the application that answers requests with turns of episodes.

    With a key, requests without it are refused. `log` gets each request with the status of the
    answer, and a text about it.
    """
    routes = _Routes(sessions, served, key, log)
    posts = {
        "/v1/chat/completions": routes.handler(routes.chat, grow=routes.growing_chat),
        "/v1/completions": routes.handler(routes.complete),
        "/inference/v1/generate": routes.handler(routes.generate, events=None),
        "/v1/responses": routes.handler(routes.respond, events=responses_api.events),
    }
    for path, take in (("", routes.answer_messages), ("/count_tokens", routes.count_tokens)):
        posts[f"/v1/messages{path}"] = routes.handler(
            take, events=messages_api.events, problem=messages_api.problem
        )

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

    def handler(
        self,
        take: Take,
        *,
        events: Events | None = protocol.events,
        grow: Stream | None = None,
        problem: Problem = protocol.problem,
    ) -> Handler:
        """Return a handler that answers with the turn that `take` asks for, and logs it.

        A stream comes from `grow`, or has the `events` of the whole reply.
        """

        async def handle(request: Request) -> Response:
            began = time.monotonic()
            about = ""
            try:
                response = await self._answer(request, take, events, grow)
            except Refusal as refusal:
                status, message, code, headers = refusal.args
                response = JSONResponse(problem(message, code), status, headers)
            except ClientDisconnect:
                about = ": the client has left"
                response = Response(status_code=400)
            except Exception as error:  # a mistake in the server costs one request
                about = f": {type(error).__name__}: {error}"[:500]
                content = problem("the server failed at this request", "internal_error")
                response = JSONResponse(content, 500)

            if self.log is not None:
                seconds = time.monotonic() - began
                self.log(request, response.status_code, f"{seconds:.2f} s{about}")

            return response

        return handle

    async def _answer(
        self, request: Request, take: Take, events: Events | None, grow: Stream | None
    ) -> Response:
        """Return the turn that a request asks for. Raises Refusal if there is none."""
        presented = request.headers.get("authorization", "").removeprefix("Bearer ")
        presented = presented or request.headers.get("x-api-key", "")
        if self.key and not hmac.compare_digest(presented.encode(), self.key.encode()):
            message = "the key is not that of this server, or that of an earlier episode"
            raise Refusal(401, message, "invalid_api_key", None)

        # A mistake in a request costs that request alone: others go on.
        try:
            body = protocol.read_body(await content_of(request, self.served.max_request_bytes))
            with ExitStack() as context:
                session = context.enter_context(
                    self.sessions(request.headers.get("x-session-id", ""))
                )
                if grow is not None and body.get("stream"):
                    growing = grow(session, body)
                    first = await _unless_left(
                        request, anext(growing)
                    )  # a refusal still has a status of its own
                    return _event_stream(_all_events(first, growing, context.pop_all()))

                turn, content = await _unless_left(request, take(session, body))
                if not (turn.token_ids or turn.finish_reason == COUNTED):
                    raise NoRoom
        except RequestTooSlow as error:
            raise Refusal(408, str(error), "request_timeout", CLOSED) from error
        except RequestTooLarge as error:
            raise Refusal(413, str(error), "request_too_large", CLOSED) from error
        except NoRoom as error:
            message = (
                "a limit of the episode leaves no room for a turn (--max_turns, --generate_max_len,"
                " --episode_minutes)"
            )
            raise Refusal(400, message, "context_length_exceeded", None) from error
        except ValueError as error:
            raise Refusal(400, str(error), "invalid_request", None) from error
        except RecursionError as error:
            message = "the request is JSON of too many brackets"
            raise Refusal(400, message, "invalid_request", None) from error

        if events is not None and body.get("stream"):
            return _event_stream(events(content, body))
        return JSONResponse(content)

    async def chat(self, session: Session, body: Body) -> tuple[Turn, Body]:
        turn = await self._chat(session, body)
        return turn, protocol.chat_reply(turn, self.served, body)

    async def _chat(self, session: Session, body: Body) -> Turn:
        messages, options = self._read_chat(session, body)
        return await session.chat(messages, **options)

    async def answer_messages(self, session: Session, body: Body) -> tuple[Turn, Body]:
        chat = messages_api.chat_body(body)
        turn = await self._chat(session, chat)
        return turn, messages_api.reply(turn, self.served, chat)

    async def count_tokens(self, session: Session, body: Body) -> tuple[Turn, Body]:
        messages, options = self._read_chat(session, messages_api.chat_body(body))
        turn = await session.chat(messages, **options, counts=True)
        return turn, {"input_tokens": len(turn.context_ids)}

    async def respond(self, session: Session, body: Body) -> tuple[Turn, Body]:
        chat = responses_api.chat_body(body, session.stored)
        turn = await self._chat(session, chat)
        response = responses_api.reply(turn, self.served, chat)
        # Instructions hold for one response.
        messages = chat["messages"][bool(body.get("instructions")) :]
        session.stored[response["id"]] = [*messages, reply(turn)]
        return turn, response

    async def growing_chat(self, session: Session, body: Body) -> AsyncIterator[str]:
        """Yield the events of a chat's turn: its text as it grows, then the rest of the reply."""
        messages, options = self._read_chat(session, body)
        sent = ""
        number = None
        # What the reply has for each token is sent with the complete turn.
        needs_tokens = body.get("logprobs") or body.get("return_token_ids")

        async for turn in session.growing_chat(messages, **options):
            if not turn.token_ids:
                raise NoRoom
            number = turn.number if number is None else number
            if turn.finish_reason:
                whole = protocol.chat_reply(replace(turn, number=number), self.served, body)
                for event in protocol.events(whole, body, sent):
                    yield event
            elif not needs_tokens and len(turn.content) > len(sent):
                yield protocol.growth(turn.content[len(sent) :], number, self.served)
                sent = turn.content

    def _options(self, session: Session, body: Body) -> protocol.Options:
        """Return the sampling options of a request, without those that the run overrides."""
        replaced = protocol.overridden(body, self.served)
        session.overridden += Counter(f"{name} {value!r:.40}" for name, value in replaced.items())
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

    async def complete(self, session: Session, body: Body) -> tuple[Turn, Body]:
        options = self._options(session, body)
        prompt = protocol.read_prompt(body.get("prompt"))
        take = session.complete if isinstance(prompt, str) else session.generate
        turn = await take(prompt, **options)
        return turn, protocol.completion_reply(turn, self.served, body)

    async def generate(self, session: Session, body: Body) -> tuple[Turn, Body]:
        parameters = body.get("sampling_params") or {}
        if not isinstance(parameters, dict):
            raise ValueError("sampling_params is an object")
        options = self._options(session, parameters)
        turn = await session.generate(protocol.read_token_ids(body.get("token_ids")), **options)
        return turn, protocol.generate_reply(turn)

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


def _event_stream(events: AsyncIterator[str] | Iterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


async def _all_events(
    first: str, events: AsyncIterator[str], session: AbstractContextManager[Any]
) -> AsyncIterator[str]:
    """Yield events, and leave the session's context after them; an error is the last event."""
    try:
        with session:
            yield first
            async for event in events:
                yield event
    except ValueError as error:
        yield protocol.event(protocol.problem(str(error)))


async def content_of(request: Request, longest: int) -> bytes:
    """Return the body of a request, and keep at most `longest` bytes of it.

    The rest is read all the same, because many clients read no answer before they have sent
    everything.
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
        raise RequestTooSlow(f"the request was not complete after {BODY_SECONDS:g} s")

    raise RequestTooLarge(
        f"the request has more than {longest} bytes, which are more tokens than the model reads"
    )


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


@asynccontextmanager
async def serving(session: Session, served: EndpointModel) -> AsyncIterator[Address]:
    """Serve an episode on a loopback port, while the context is open.

    Its key keeps out requests of earlier episodes.
    """
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
