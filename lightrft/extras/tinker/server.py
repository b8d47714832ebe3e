"""The loop of all ranks: rank 0 takes requests from the queue, and all ranks do them."""

from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from loguru import logger

from lightrft.app.run.interruption import SERVER_STOPS, Interruption
from lightrft.config.sections import ServerSection
from lightrft.extras.http_server import POLL_SECONDS, listener_of_rank_0, start_answering
from lightrft.extras.tinker.frontend import Frontend
from lightrft.extras.tinker.promises import Job
from lightrft.extras.tinker.records import RequestRefused, SamplePrompt
from lightrft.extras.tinker.worker import TinkerWorker
from lightrft.strategy.checkpoint.atomic import CheckpointError
from lightrft.strategy.strategy import StrategyBase

SAMPLE = "sample"


@dataclass(eq=False)
class TinkerServer:
    """Answers clients until the process is interrupted. All ranks build it and call serve().

    It listens at the address on rank 0. Raises ValueError on all ranks if that is in use.
    """

    strategy: StrategyBase
    worker: TinkerWorker
    frontend: Frontend
    section: ServerSection

    def __post_init__(self) -> None:
        self.world = self.strategy.mesh.world
        self._prompts: dict[int, Future[Any]] = {}
        """Number of a prompt that is sampled -> the answer, on rank 0."""
        self._listener = listener_of_rank_0(self.section, self.world)

    def serve(self) -> None:
        """Do requests; raise Interrupted on all ranks when one of them is asked to stop."""
        with Interruption(self.world, SERVER_STOPS) as self._interruption:
            if self.strategy.is_rank_0():
                address = start_answering(self.frontend.application(), self._listener)
                logger.info("serving {} at {}", self.frontend.model_name, address)

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
