"""Ctrl-C and the scheduler's SIGTERM, taken at a safe point and by all ranks together."""

import signal
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
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def safe_point(self) -> None:
        """Raise Interrupted on every rank when any rank received a signal. All ranks must call it."""
        asked = int(self.world.max(torch.tensor(self._signal)))
        if asked:
            raise Interrupted(asked)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._signal:
            raise KeyboardInterrupt
        self._signal = number
        if number == signal.SIGINT:  # a launcher sends SIGTERM to the others when a rank has ended: nobody waits for an answer
            logger.warning("stopping at the next safe point, with a checkpoint; once more to stop at once without one")
