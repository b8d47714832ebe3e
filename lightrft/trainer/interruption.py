"""Ctrl-C and the scheduler's SIGTERM, taken at a safe point and by all ranks together."""

import os
import signal
import threading
from types import FrameType, TracebackType

import torch
from loguru import logger

from lightrft.parallel.collectives import Axis

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """The run was asked to stop; all ranks left the loop at the same place."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class Interruption:
    """While active, the first signal only asks; the loop answers at its next safe point. The second one ends at once."""

    def __init__(self, world: Axis):
        self.world = world
        self._signal = 0

    def __enter__(self) -> "Interruption":
        global _active
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        _active = self
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        global _active
        _active = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def leave_to_child(self) -> None:
        """Give a forked child the handlers from before, so that SIGTERM ends it. It survives the Ctrl-C that only asks the run to
        stop: a terminal sends that to both, and the run needs its child until the next safe point."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if not self._signal:
            signal.signal(signal.SIGINT, lambda number, frame: signal.signal(number, self._before[number]))

    def safe_point(self) -> None:
        """Raise Interrupted on every rank when any rank received a signal. All ranks must call it."""
        signum = int(self.world.max(torch.tensor(self._signal)))
        if signum:
            raise Interrupted(signum)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._signal:
            raise KeyboardInterrupt
        self._signal = number
        if number == signal.SIGINT:  # a launcher sends SIGTERM to the others when a rank has ended: nobody waits for an answer
            logger.warning("stopping at the next safe point, with a checkpoint; once more to stop at once without one")


_active: Interruption | None = None
_masks = threading.local()
"""The signals that the forking thread had blocked before."""


def _before_fork() -> None:
    """Block the signals: Python forgets one that arrives in the child before its handlers are those of a child."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    if _active is not None:
        _active.leave_to_child()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child, after_in_parent=_after_fork)
