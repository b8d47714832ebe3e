"""Handle Ctrl-C and the scheduler's SIGTERM at a safe point, on all ranks together."""

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType

import torch
from loguru import logger

from lightrft.models.parallel.collectives import Axis

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SERVER_STOPS = "the server stops after the requests that run; interrupt again to stop immediately"
STOPPING = (
    "stopping at the next safe point, with a checkpoint; interrupt again to stop immediately"
    " without one"
)


class Interrupted(Exception):
    """Raised when the run was asked to stop; all ranks left the loop at the same point."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class Interruption:
    """Signal handling of a run.

    The first signal stops it at the next safe point, the second one at once, with a
    KeyboardInterrupt that has the number of the signal.
    """

    def __init__(self, world: Axis, stopping: str = STOPPING):
        """Handle signals of a run. `stopping` is what the log says at the first Ctrl-C."""
        self.world = world
        self.stopping = stopping
        self.received = 0
        """Number of the signal that this rank has received, or 0."""
        self.at_once = False
        """True while there is nothing to save, so that the first signal stops the run at once."""

    def __enter__(self) -> "Interruption":
        global _active
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        _active = self
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        _active = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def leave_to_child(self) -> None:
        """Restore the earlier handlers in a forked child, so that SIGTERM ends it.

        The child survives the Ctrl-C that only asks the run to stop: a terminal sends that to both,
        and the run needs the child until the next safe point.
        """
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if not self.received:
            signal.signal(
                signal.SIGINT, lambda number, frame: signal.signal(number, self._before[number])
            )

    def safe_point(self) -> None:
        """Raise Interrupted on every rank when any rank received a signal.

        All ranks must call it.
        """
        self.heed([int(self.world.max(torch.tensor(self.received)))])

    def heed(self, signals: Sequence[int]) -> None:
        """Raise Interrupted if a rank received a signal. `signals` has what each one received."""
        if any(signals):
            raise Interrupted(max(signals))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received or self.at_once:
            raise KeyboardInterrupt(number)
        self.received = number
        # When a rank has ended, a launcher sends SIGTERM to the others, and nobody reads this.
        if number == signal.SIGINT:
            logger.warning(self.stopping)


_active: Interruption | None = None
_masks = threading.local()
"""Per thread, the signals that it had blocked before it forked."""


def _before_fork() -> None:
    """Block the signals.

    Python drops one that arrives in the child before the child's handlers are installed.
    """
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    if _active is not None:
        _active.leave_to_child()
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_child=_after_fork_in_child, after_in_parent=_after_fork
)
