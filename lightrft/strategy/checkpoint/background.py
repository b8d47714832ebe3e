"""Run jobs in the background of training, one at a time, on all ranks together."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from loguru import logger

from lightrft.models.parallel.collectives import Axis


class Background:
    """A background thread on every rank.

    Its collectives use `background_axis`, so they never mix with the collectives of training.
    """

    def __init__(self, world: Axis, background_axis: Axis):
        self.world = world
        self.background_axis = background_axis
        self._thread = ThreadPoolExecutor(1, "lightrft-background")
        self._job: Future[None] | None = None

    def start(self, job: Callable[[Axis], None]) -> None:
        """Run `job(background_axis)`. All ranks call it, after finish()."""
        if self._job is not None:
            raise RuntimeError("a job is running in the background: call finish() first")
        self._job = self._thread.submit(job, self.background_axis)

    def finish(self, *, wait: bool = True) -> bool:
        """Return True if no job is running; with `wait`, wait until that is so.

        All ranks call it and get the same result. An error of the job is raised here, on all ranks.
        """
        if self._job is None:
            return True

        # Threads end at different times, so ranks agree whether all have ended.
        ended = torch.tensor(int(self._job.done()))
        if not wait and not int(self.world.min(ended)):
            return False

        job, self._job = self._job, None
        job.result()
        return True

    def close(self) -> None:
        """Wait for the job and log a failure: finish() will not be called any more."""
        self._thread.shutdown()
        if self._job is not None and (failure := self._job.exception()) is not None:
            logger.error("{}", failure)
