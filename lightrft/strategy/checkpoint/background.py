"""Run jobs in the background of training, one at a time, on all ranks together."""

import threading
from collections.abc import Callable

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
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, job: Callable[[Axis], None]) -> None:
        """Run `job(background_axis)`. All ranks call it, after finish()."""
        if self._thread is not None:
            raise RuntimeError("a job is running in the background: call finish() first")
        self._thread = threading.Thread(target=self._run, args=(job,), name="lightrft-background")
        self._thread.start()

    def finish(self, *, wait: bool = True) -> bool:
        """Return True if no job is running; with `wait`, wait until that is so.

        All ranks call it and get the same result. An error of the job is raised here, on all ranks.
        """
        if self._thread is None:
            return True

        # Threads end at different times, so ranks agree whether all have ended.
        ended = torch.tensor(int(not self._thread.is_alive()))
        if not wait and not int(self.world.min(ended)):
            return False

        self.join()
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

        return True

    def join(self) -> None:
        """Wait for this rank's thread only. A failure is kept for finish()."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for the job and log a failure: finish() will not be called any more."""
        self.join()
        if self._failure is not None:
            logger.error("{}", self._failure)

    def _run(self, job: Callable[[Axis], None]) -> None:
        try:
            job(self.background_axis)
        except BaseException as error:
            self._failure = error
