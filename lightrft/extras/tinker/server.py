"""The loop of all ranks: rank 0 takes requests from the queue, and all ranks do them."""

import asyncio
import threading
from collections.abc import Hashable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import uvicorn
from loguru import logger

from lightrft.app.run.interruption import SERVER_STOPS, Interruption
from lightrft.app.run.listener import listener_of_rank_0
from lightrft.config.sections import ServerSection
from lightrft.extras.agents.endpoint.server import listening, server_settings
from lightrft.extras.tinker.frontend import Frontend
from lightrft.extras.tinker.promises import Job
from lightrft.extras.tinker.records import RequestRefused, SamplePrompt
from lightrft.extras.tinker.worker import TinkerWorker
from lightrft.strategy.checkpoint.atomic import CheckpointError
from lightrft.strategy.strategy import StrategyBase

POLL_SECONDS = 0.5
"""Longest time between two looks of all ranks at signals, while there are no requests."""
SAMPLE = "sample"


class TinkerServer:
    """Answers clients until the process is interrupted. All ranks build it and call serve()."""

    def __init__(
        self,
        strategy: StrategyBase,
        worker: TinkerWorker,
        frontend: Frontend,
        section: ServerSection,
    ):
        """Listen at the address on rank 0. Raises ValueError on all ranks if it is in use."""
        self.strategy = strategy
        self.worker = worker
        self.frontend = frontend
        self.world = strategy.mesh.world
        self._prompts: dict[int, Future[Any]] = {}
        """Number of a prompt that is sampled -> the answer, on rank 0."""
        self._listener = listener_of_rank_0(listening, section, self.world)

    def serve(self) -> None:
        """Do requests; raise Interrupted on all ranks when one of them is asked to stop."""
        with Interruption(self.world, SERVER_STOPS) as self._interruption:
            if self.strategy.is_rank_0():
                threading.Thread(
                    target=lambda: asyncio.run(self._listen()), name="tinker", daemon=True
                ).start()
                host, port = self._listener.getsockname()[:2]
                logger.info("serving {} at http://{}:{}", self.frontend.model_name, host, port)

            while True:
                self.strategy.announce("")  # waiting has no time limit
                self._do_next()
                self._interruption.safe_point()

    def _do_next(self) -> None:
        """Do the next job on all ranks, if there is one."""
        jobs = self.frontend.jobs.take(POLL_SECONDS) if self.strategy.is_rank_0() else []
        work = [(job.verb, job.arguments) for job in jobs]
        work = self.world.broadcast_tensors(work)
        if not work:
            return

        verb, arguments = work[0]
        self.strategy.announce(verb)
        try:
            if verb == SAMPLE:
                self._sample(jobs, [arguments["prompt"] for _, arguments in work])
            else:
                result = getattr(self.worker, verb)(**arguments)
                for job in jobs:
                    job.result.set_result(result)
        # All ranks raise these alike; anything else ends the server.
        except (RequestRefused, CheckpointError) as error:
            logger.warning("{}: {}", verb, error)
            for job in jobs:
                if not job.result.done():
                    job.result.set_exception(error)

    def _sample(self, jobs: list[Job], prompts: list[SamplePrompt]) -> None:
        self._begin(jobs)
        try:
            for number, sampled in self.worker.sample(prompts, self._more):
                if self.strategy.is_rank_0():
                    self._prompts.pop(number).set_result(sampled)
        finally:
            self._prompts.clear()

    def _begin(self, jobs: list[Job]) -> None:
        self._prompts |= {job.arguments["prompt"].number: job.result for job in jobs}

    def _more(self, weights: Hashable) -> list[SamplePrompt]:
        """Return the prompts for these weights that have come meanwhile, on all ranks."""
        self._interruption.safe_point()
        jobs = self.frontend.jobs.prompts(weights) if self.strategy.is_rank_0() else []
        self._begin(jobs)
        return self.world.broadcast_tensors([job.arguments["prompt"] for job in jobs])

    async def _listen(self) -> None:
        """Answer requests in a thread of its own."""
        with suppress(asyncio.CancelledError):
            await uvicorn.Server(server_settings(self.frontend.application())).serve(
                sockets=[self._listener]
            )
