"""OpenAI-compatible server of a model that does not learn, with the routes that agents have in training."""

import asyncio
import os
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import uvicorn
from loguru import logger

from lightrft.agents.endpoint.protocol import EndpointModel
from lightrft.agents.endpoint.server import application, listening, server_settings
from lightrft.agents.messages import Ended
from lightrft.agents.session import Session
from lightrft.config.references import MODEL_KEY
from lightrft.config.sections import ServerSection
from lightrft.rollout.groups import Group
from lightrft.rollout.sampler import Sampler
from lightrft.run.interruption import Interruption
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.types import Prompt

STEPS = 4
"""Number of steps of the engine between two looks at new sessions and signals."""
POLL_SECONDS = 0.5
"""Longest time between two looks of all ranks at signals, while there are no requests."""
AT_ONCE = 256
"""Number of requests that are answered at the same time."""


class ClientSessions:
    """Sessions of clients by their `x-session-id`. A request without one has a session of its own, which ends with it."""

    def __init__(self) -> None:
        self.new: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        """The other ends of sessions that have begun."""
        self._named: dict[str, Session] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[Session]:
        """Yield the session. Raises ValueError if its time is over; the next request begins another one."""
        session = self._named.get(name) or self._begin()
        if name:
            self._named[name] = session
        try:
            yield session
        except (EOFError, OSError) as error:
            self._named.pop(name, None)
            raise ValueError(f"the session {name!r} has ended after --environment_minutes without a request") from error
        finally:
            if not name:
                with suppress(OSError):
                    session.connection.send(Ended())

    def _begin(self) -> Session:
        client_end, server_end = Pipe()
        self.new.put(server_end)
        return Session(client_end)


class ModelServer:
    """Answers requests until the process is interrupted. All ranks of the engine build it and call serve()."""

    def __init__(self, strategy: StrategyBase, sampler: Sampler, served: EndpointModel, section: ServerSection, *, seed: int):
        """Listen at the address on rank 0. Raises ValueError on all ranks if it is in use."""
        self.strategy, self.sampler, self.served, self.seed = strategy, sampler, served, seed
        self.sessions, problem = ClientSessions(), ""
        if strategy.is_rank_0():
            try:
                self._listener = listening(section.host, section.port)
            except OSError as error:
                problem = f"--host {section.host} --port {section.port}: {error.strerror or error}"
        if problem := strategy.mesh.world.broadcast(problem):
            raise ValueError(problem)

    def serve(self) -> None:
        """Answer requests; raise Interrupted on all ranks when one of them is asked to stop."""
        self.strategy.announce("")
        with Interruption(self.strategy.mesh.world) as interruption, self.strategy.engine_awake():
            if self.strategy.is_rank_0():
                threading.Thread(target=lambda: asyncio.run(self._listen()), name="model-server", daemon=True).start()
                host, port = self._listener.getsockname()[:2]
                logger.info("serving {} at http://{}:{}/v1", self.served.name, host, port)
            growth, numbers = self.sampler.open(self.seed), count(1)
            while True:
                for connection in self._new_sessions(wait=not growth.running()):
                    group = Group.begin(next(numbers), 0, Prompt(0, "", []), count=1, greedy=False)
                    growth.attach(group, connection)
                for group in growth.steps(STEPS):
                    growth.forget(group)
                interruption.safe_point()

    def _new_sessions(self, *, wait: bool) -> Iterator[Connection]:
        """Yield the sessions that have begun, on rank 0; wait a moment for the first one if nothing else is to be done."""
        if self.strategy.is_rank_0():
            with suppress(queue.Empty):
                yield self.sessions.new.get(block=wait, timeout=POLL_SECONDS)
                while True:
                    yield self.sessions.new.get_nowait()

    async def _listen(self) -> None:
        """Answer requests in a thread with its own event loop."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(AT_ONCE))
        app = application(self.sessions, self.served, os.environ.get(MODEL_KEY, ""))
        with suppress(asyncio.CancelledError):
            await uvicorn.Server(server_settings(app)).serve(sockets=[self._listener])
