"""Calls of a reward function, one after the other: in a thread while other responses grow, or in the main thread."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from loguru import logger

from lightrft.config import ConfigError
from lightrft.strategy.watchdog import beside_main_thread, leave, place_of
from lightrft.types import Sample

USER_ERROR = 2
"""Exit code, as of the other mistakes of a user's code."""
PAUSE = 0.05
"""Seconds until the thread is looked at again, where it is between two calls."""


class NeedsMainThread(Exception):
    """The function wanted to set a signal handler, which Python allows in the main thread only."""


class RewardCalls:
    """Calls `function` with lists of samples. Errors of a call, and that of a call that takes too long, are raised in wait()."""

    def __init__(
        self,
        flag: str,
        function: Callable[[list[Sample]], None],
        *,
        background: bool,
        limit: float | None,
        fail: Callable[..., Any] | None = None,
    ):
        """A call may take `limit` seconds, None for any time; `flag` names the function. `fail` ends the other ranks, for a call
        that hangs in the main thread: the process then has no way on.
        """
        self.flag, self.function, self.background, self.limit, self.fail = flag, function, background, limit, fail
        self._queue: SimpleQueue[tuple[list[Sample], Future]] = SimpleQueue()
        self._begun: list[tuple[list[Sample], Future | None]] = []
        self._under_way: tuple[list[Sample], float] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, samples: list[Sample]) -> None:
        """Call the function with these as soon as the calls before have returned; outside of the background, in wait()."""
        future = None
        if self.background:
            future = Future()
            self._queue.put((samples, future))
            if self._thread is None:  # a daemon: a function that hangs does not keep the process from ending
                self._thread = threading.Thread(target=self._run, name="reward", daemon=True)
                self._thread.start()
        self._begun.append((samples, future))

    def wait(self) -> None:
        """Return when all calls that were begun have returned."""
        begun, self._begun = self._begun, []
        for samples, future in begun:
            try:
                if future is None:
                    self._call_here(samples)
                else:
                    self._wait(future)
            except NeedsMainThread:
                self._call_here(samples)

    def _run(self) -> None:
        while True:
            samples, future = self._queue.get()
            error = self._call_in_thread(samples) if self.background else NeedsMainThread()
            future.set_exception(error) if error else future.set_result(None)

    def _call_in_thread(self, samples: list[Sample]) -> BaseException | None:
        """The error of the call, if there was one."""
        self._under_way, error = (samples, time.monotonic()), None
        with beside_main_thread("reward"), _refused_handlers() as refused:
            try:
                self.function(samples)
            except BaseException as raised:
                error = raised
        self._under_way = None
        if refused:
            self.background = False
            logger.info(f"{self.flag} sets signal handlers, as math-verify does for its timeouts: it is called in the main "
                        "thread from now on, when responses are complete (--no_reward_background)")  # fmt: skip
            return NeedsMainThread()
        return error

    def _wait(self, future: Future) -> None:
        while not future.done():
            under_way, pause = self._under_way, PAUSE
            if self.limit is None:
                pause = None
            elif under_way is not None:
                pause = under_way[1] + self.limit - time.monotonic()
                if pause <= 0:
                    raise self._too_late(under_way[0], self._thread.ident or 0)
            wait_for([future], timeout=pause)
        future.result()

    def _call_here(self, samples: list[Sample]) -> None:
        timer = threading.Timer(self.limit or 0, self._end, [samples, threading.get_ident()])
        timer.daemon = True
        if self.limit is not None:
            timer.start()
        try:
            self.function(samples)
        finally:
            timer.cancel()

    def _end(self, samples: list[Sample], thread: int) -> None:
        error = self._too_late(samples, thread)
        if self.fail is not None:
            self.fail(error, code=USER_ERROR, brief=True)
        logger.error(str(error))
        leave(str(error), USER_ERROR)

    def _too_late(self, samples: list[Sample], thread: int) -> ConfigError:
        return ConfigError(
            f"{self.flag}: a call has taken more than {self.limit:.0f} s (--reward_minutes), for {len(samples)} responses to the "
            f"prompt {samples[0].prompt.text!r:.200}. It is at {place_of(thread)}"
        )


@contextmanager
def _refused_handlers() -> Iterator[list[int]]:
    """Give the list of signals for which this thread is refused a handler; a function may catch the error and go on without."""
    refused: list[int] = []
    thread, set_handler = threading.get_ident(), signal.signal

    def noted(number: int, handler: Any) -> Any:
        try:
            return set_handler(number, handler)
        except ValueError:
            if threading.get_ident() == thread:
                refused.append(number)
            raise

    signal.signal = noted
    try:
        yield refused
    finally:
        signal.signal = set_handler
