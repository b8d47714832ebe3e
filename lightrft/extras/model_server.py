"""OpenAI-compatible server of a model that does not learn.

It has the routes that agents have in training.
"""

import asyncio
import os
import queue
import resource
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from os.path import commonprefix
from threading import Lock
from typing import Any, TypeVar

from loguru import logger
from starlette.requests import ClientDisconnect, Request

from lightrft.app.run.interruption import SERVER_STOPS, Interruption
from lightrft.config.references import MODEL_KEY
from lightrft.config.sections import ServerSection
from lightrft.core.groups import Group
from lightrft.core.samples import Prompt
from lightrft.extras.agents.endpoint.protocol import EndpointModel
from lightrft.extras.agents.endpoint.server import application
from lightrft.extras.agents.messages import (
    BEGINNING,
    LENGTH,
    Ended,
    Message,
    Turn,
    TurnRequest,
    to_bytes,
)
from lightrft.extras.agents.session import Session
from lightrft.extras.agents.tool_calls import hermes, settled
from lightrft.extras.agents.turn_format import TurnFormat
from lightrft.extras.episode_sampler import EpisodeSampler
from lightrft.extras.http_server import POLL_SECONDS, listener_of_rank_0, start_answering
from lightrft.strategy.strategy import StrategyBase

T = TypeVar("T")
STEPS_PER_LOOK = 4
"""Number of steps of the engine between two looks at new sessions and signals."""
MAX_FILES = 65536
SPARE_FILES = 512
"""Number of open files that are left for everything but sessions."""
PIECE = 16
"""Number of tokens of a turn that are sampled between two events of a stream."""
FILES_OF_A_SESSION = 3
"""Both ends of the socket, and the connection of the client."""


class ServedSession(Session):
    """Session that tokenizes prompts in a separate thread.

    The loop that all requests share never does that.
    """

    def __init__(
        self, connection: Connection, format: TurnFormat, tokenizing: Executor, *, in_pieces: bool
    ):
        """`in_pieces` says whether a stream can sample a turn in several requests."""
        super().__init__(connection)
        self._format = format
        self._tokenizing = tokenizing
        self._in_pieces = in_pieces
        self._writing = Lock()
        self.name = f"{secrets.token_hex(6)}_"

    async def request(self, request: TurnRequest, **sent: Any) -> Turn:
        token_ids = await self._in_thread(self._token_ids, request)
        return await super().request(replace(request, observation=token_ids), **sent)

    async def growing_chat(
        self, messages: list[Message], *, in_pieces: bool, tools: Any = None, **options: Any
    ) -> AsyncIterator[Turn]:
        """Yield the turn that follows the messages of a chat as it grows.

        Each PIECE of tokens is a request that continues the one before it, so it costs a prefill of
        what the engine's prefix cache does not have.
        """
        # A text that ends the turn may lie across two pieces.
        if not (in_pieces and self._in_pieces) or options.get("stop"):
            yield await self.chat(messages, tools=tools, **options)
            return

        request, messages = self._read_chat(messages, tools, options)
        max_tokens = request.max_tokens
        turn = None
        while turn is None or not turn.finish_reason:
            sampled = turn.token_ids if turn else []
            most = PIECE if max_tokens is None else min(PIECE, max_tokens - len(sampled))
            piece = await self.request(replace(request, max_tokens=most))
            first = turn or piece
            # A limit of the server may be in the middle of a piece, or at the end of it.
            full = len(piece.token_ids) == most and len(sampled) + most != max_tokens
            grows = piece.finish_reason == LENGTH and full and not piece.is_last
            turn = replace(
                first,
                token_ids=[*sampled, *piece.token_ids],
                logprobs=[*turn.logprobs, *piece.logprobs] if turn else piece.logprobs,
                finish_reason="" if grows else piece.finish_reason,
            )
            turn = await self._in_thread(self._with_text, turn, bool(tools))
            if turn.token_ids and not grows:
                self.history.set_chat(piece.number, turn, messages, tools)
            yield turn
            request = replace(request, observation=[], after=piece.number, tools=[])

    def _with_text(self, turn: Turn, with_calls: bool) -> Turn:
        """Return a turn with the text of its tokens; the content of a growing one only grows."""
        text = self._format.tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        if turn.finish_reason:
            content, calls = self._format.read_calls(hermes, turn.token_ids, turn.context_ids)
            return replace(turn, text=text, tool_calls=calls, content=content if calls else text)
        # Calls are read with special tokens. A piece of a character is not shown.
        shown = commonprefix([text, self._format.decode(turn.token_ids)]).rstrip("\ufffd")
        opened = self._format.opens_thinking(turn.context_ids)
        content = settled(opened + shown, with_calls=with_calls).removeprefix(opened)
        return replace(turn, text=text, content=content)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._tokenizing, function, *arguments
        )

    async def _send(self, content: bytes) -> None:
        # A long request is sent while the rank reads it. The thread would go on without the task.
        await asyncio.shield(asyncio.to_thread(self._write, content))

    def _write(self, content: bytes) -> None:
        # If the session has ended, who waits for the reply gets the end of the connection.
        with self._writing, suppress(OSError):
            self.connection.send_bytes(content)

    def _close(self) -> None:
        # A thread may still write: its descriptor must not become that of another file.
        asyncio.get_running_loop().run_in_executor(None, self._close_after_writing)

    def _close_after_writing(self) -> None:
        with self._writing:
            self.connection.close()

    def _token_ids(self, request: TurnRequest) -> list[int]:
        if request.after is None or request.after == BEGINNING:
            return list(self._format.prompt(Prompt(0, "", []), request).token_ids)
        return self._format.tokens(request, self.turns[request.after].token_ids[-1])


class ClientSessions:
    """Sessions of clients by `x-session-id`.

    A request without one has a separate session that ends with it.
    """

    def __init__(self, format: TurnFormat, *, in_pieces: bool) -> None:
        self.new: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        """The other ends of sessions that have begun."""
        self._format = format
        self._in_pieces = in_pieces
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        self._named: dict[str, ServedSession] = {}
        self._busy: Counter[str] = Counter()
        """Number of requests of a session that are answered now."""
        self._most = (_open_files() - SPARE_FILES) // FILES_OF_A_SESSION

    @contextmanager
    def __call__(self, name: str) -> Iterator[Session]:
        """Yield the session.

        Raises ValueError if the time is over; the next request begins another one.
        """
        self._forget_ended(name)
        session = self._named.get(name) or self._begin()
        if name:
            self._named[name] = session
            self._busy[name] += 1

        try:
            yield session
        except (EOFError, OSError) as error:
            self._forget(name, session)
            raise ValueError(
                f"the session {name!r} has ended after --environment_minutes without a request"
            ) from error
        except (asyncio.CancelledError, ClientDisconnect):
            # The engine drops what it samples when the session ends. Its next request has all of
            # the conversation.
            if name and self._busy[name] == 1:
                self._forget(name, session)
            raise
        finally:
            self._busy -= Counter([name])
            if not name:
                with suppress(OSError):
                    session.connection.send_bytes(to_bytes(Ended()))
                session.close()

    def _begin(self) -> ServedSession:
        if len(self._named) >= self._most:
            raise ValueError(
                f"the server has {self._most} sessions, as many as it can: use one of them, or none"
                " (x-session-id)"
            )
        client_end, server_end = Pipe()
        self.new.put(server_end)
        return ServedSession(client_end, self._format, self._tokenizing, in_pieces=self._in_pieces)

    def _forget_ended(self, asked: str) -> None:
        """Forget the sessions whose time is over, except the one that is asked for.

        Its client learns that it has ended.
        """
        for name, session in list(self._named.items()):
            waits = self._busy[name] or session.waits
            if name != asked and not waits and session.connection.poll():
                self._forget(name, session)

    def _forget(self, name: str, session: ServedSession) -> None:
        if self._named.get(name) is session:
            del self._named[name]
        session.close()


def _open_files() -> int:
    """Raise the number of files that this process can open as far as possible, and return it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, MAX_FILES), most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@dataclass(eq=False)
class ModelServer:
    """Answers requests until the process is interrupted.

    All ranks of the engine build it and call serve().
    """

    strategy: StrategyBase
    sampler: EpisodeSampler
    served: EndpointModel
    section: ServerSection
    seed: int

    def __post_init__(self) -> None:
        """Listen at the address on rank 0. Raises ValueError on all ranks if it is in use."""
        rollout = self.sampler.section
        episodes = self.sampler.episodes
        format = copy(episodes.format)
        format.tokenizer = deepcopy(format.tokenizer)  # another thread uses this one
        # These settings hold for a turn as a whole, and so do parsers that are not ours.
        for_whole_turns = rollout.stop or rollout.min_tokens or episodes.section.turn_max_len
        self.sessions = ClientSessions(
            format, in_pieces=not for_whole_turns and episodes.parse is hermes
        )
        self._listener = listener_of_rank_0(self.section, self.strategy.mesh.world)

    def serve(self) -> None:
        """Answer requests; raise Interrupted on all ranks when one of them is asked to stop."""
        self.strategy.announce("")
        with (
            Interruption(self.strategy.mesh.world, SERVER_STOPS) as interruption,
            self.strategy.engine_awake(),
        ):
            if self._listener is not None:
                key = os.environ.get(MODEL_KEY, "")
                app = application(self.sessions, self.served, key, log=_log)
                address = start_answering(app, self._listener)
                logger.info("serving {} at {}/v1", self.served.name, address)

            loop = self.sampler.open(self.seed)
            numbers = count(1)
            while True:
                for connection in self._new_sessions(wait=not loop.running()):
                    group = Group.begin(next(numbers), 0, Prompt(0, "", []), 1)
                    loop.attach(group, connection)
                loop.forget(list(loop.steps(STEPS_PER_LOOK)))
                interruption.safe_point()

    def _new_sessions(self, *, wait: bool) -> Iterator[Connection]:
        """Yield the sessions that have begun, on rank 0.

        If nothing else is to be done, wait a moment for the first one.
        """
        if self.strategy.is_rank_0():
            with suppress(queue.Empty):
                yield self.sessions.new.get(block=wait, timeout=POLL_SECONDS)
                while True:
                    yield self.sessions.new.get_nowait()


def _log(request: Request, status: int, about: str) -> None:
    client = request.client.host if request.client else "?"
    logger.info("{} {} {}: {} in {}", client, request.method, request.url.path, status, about)
