"""Call a reward function in worker processes during generation.

Like calls in this process (runner.py), it has `begin(samples)`, which returns an object whose
result() is what the function returned. result() raises CallFailed for a call that raises, dies, or
takes too long. Whatever a worker does, every call gets a result.
"""

import math
import os
import pickle
import re
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from loguru import logger

from lightrft.core.metrics import Untraced
from lightrft.core.samples import Sample
from lightrft.rewards.conventions import common_columns
from lightrft.rewards.forks import STACK_SIGNAL, Forks, Mailbox, Worker
from lightrft.rewards.worker import Setup

MAX_STACK_BYTES = 65536
"""Number of bytes of a worker's stack to read at most."""
FLUSH_SECONDS = 0.02
"""Time between two looks whether a worker has read what was sent before."""
STACK_SECONDS = 3.0
"""Seconds for a worker that is out of time to write its stack, and for the thread to end."""
START_FILES = ("rewards/worker.py", "rewards/forks.py", "<string>")
"""Ends of file names that are on the stack of every worker."""
STACK_LINE = re.compile(r'File "(.*)", line (\d+) in (\S+)')


class CallFailed(Exception):
    """Raised when a call of a reward function returned no rewards; the message gives the reason."""

    def __init__(self, problem: str, sample: Sample | None = None, hint: str = ""):
        """Set the message.

        `sample` is the one that made the call fail, if it is known. `hint` follows the message.
        """
        super().__init__(problem)
        self.sample = sample
        self.hint = hint


class WrongCount(CallFailed):
    """Raised when a call did not return one reward for each sample.

    No single sample is to blame.
    """


def out_of_time(limit: float, location: str) -> CallFailed:
    return CallFailed(
        f"a call has taken more than {limit:g} s (--reward_minutes)",
        hint=f". It is at {location}" if location else "",
    )


def failure_of(problem: str, samples: list[Sample]) -> CallFailed:
    """Return the failure of a function that raised.

    It may lack a column, so the message lists them.
    """
    columns = ", ".join(sorted(common_columns(samples))) or "none"
    return CallFailed(problem, hint=f". The data has the columns {columns}")


@dataclass(slots=True, eq=False)
class _Call:
    samples: list[Sample]
    future: Future = field(default_factory=Future)
    died: bool = False
    """True if a worker has died during this call.

    Something else may have killed it, so the call is repeated once.
    """


@dataclass(slots=True, eq=False)
class _Worker(Worker):
    call: _Call | None = None
    began: float = 0.0
    mailbox: Mailbox = field(init=False)

    def __post_init__(self) -> None:
        self.mailbox = Mailbox(self.socket)


class Processes:
    """Calls in worker processes: a call that takes too long is killed with the worker.

    The workers are forked by a process of their own (worker.py) that is started with the first
    call. A thread sends calls and receives results, so the rank's interpreter spends no time on a
    call except for pickling the samples.
    """

    def __init__(self, setup: Setup, *, workers: int, limit: float):
        """Set up the calls.

        At most `workers` of them run at once, each for at most `limit` seconds.
        """
        self.setup = setup
        self.workers = workers
        self.limit = limit
        self.trace = Untraced()
        self._waiting: deque[_Call] = deque()
        self._pool: list[_Worker] = []
        self._forks = Forks(setup)
        self._closed = False
        self._lock = threading.Lock()
        self._ended = ""
        """Why no call is made any longer."""
        self._wake_receive, self._wake_send = os.pipe()
        os.set_blocking(self._wake_send, False)
        self._thread: threading.Thread | None = None

    def begin(self, samples: list[Sample], *, first: bool = False) -> Future[Any]:
        """Call the function with these samples; `first`: before all waiting calls."""
        call = _Call(samples)
        with self._lock:
            if self._ended:
                call.future.set_exception(CallFailed(self._ended))
                return call.future
            self._waiting.appendleft(call) if first else self._waiting.append(call)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="reward", daemon=True)
            self._thread.start()

        self._wake()
        return call.future

    def close(self) -> None:
        """End the worker processes. Calls that have no result yet raise CallFailed."""
        if self._thread is not None and not self._closed:
            self._closed = True
            self._wake()
            self._thread.join(STACK_SECONDS)

    def _wake(self) -> None:
        """Wake the thread.

        The caller is the loop of an engine and never waits. A full pipe will wake the thread as
        well.
        """
        with suppress(BlockingIOError):
            os.write(self._wake_send, b"w")

    # -- the methods below run in the thread

    def _run(self) -> None:
        ended = "the worker processes have been closed"
        try:
            self._serve()
        except Exception as error:  # a bug here must not let the run wait for ever
            ended = (
                f"the thread of the worker processes has failed: {type(error).__name__}: {error}"
            )
            logger.opt(exception=True).error(ended)
        finally:
            with self._lock:
                self._ended = ended

            unfinished = [*self._waiting, *(worker.call for worker in self._pool if worker.call)]
            for call in unfinished:
                call.future.set_exception(CallFailed(ended))
            self._waiting.clear()
            self._pool, workers = [], self._pool
            for worker in workers:
                worker.kill()
            self._end_parent()

    def _serve(self) -> None:
        while not self._closed:
            self._dispatch()
            busy = [worker for worker in self._pool if worker.call]
            left = min(
                (worker.began + self.limit - time.perf_counter() for worker in busy),
                default=math.inf,
            )
            if any(worker.mailbox.is_full for worker in busy):
                left = min(left, FLUSH_SECONDS)
            sockets = [worker.socket for worker in self._pool]
            ready = wait(
                [self._wake_receive, *sockets], None if left == math.inf else max(left, 0.0)
            )
            if self._wake_receive in ready:
                os.read(self._wake_receive, MAX_STACK_BYTES)

            for worker in list(self._pool):
                if worker.socket.closed:  # it was killed together with others
                    continue

                if worker.socket.poll():  # also if it has answered while another one was ended
                    self._read_reply(worker)
                elif worker.mailbox.is_full:
                    self._flush(worker)

                if (
                    worker in self._pool
                    and worker.call
                    and time.perf_counter() >= worker.began + self.limit
                ):
                    self._out_of_time(worker)

    def _dispatch(self) -> None:
        while self._waiting:
            idle = next((worker for worker in self._pool if worker.call is None), None)
            if idle is None and len(self._pool) == self.workers:
                return

            call = self._waiting.popleft()
            try:
                worker = idle or self._fork()
                worker.call = call
                worker.began = time.perf_counter()
                worker.mailbox.send(pickle.dumps(call.samples, protocol=pickle.HIGHEST_PROTOCOL))
            except (OSError, EOFError):
                if idle is None:
                    self._end_parent()
                    self._repeat(call, "the process that starts the workers has ended")
            except CallFailed as error:
                call.future.set_exception(error)
            except Exception as error:  # raised by pickle
                if worker := next((each for each in self._pool if each.call is call), None):
                    worker.call = None
                call.future.set_exception(CallFailed(f"{type(error).__name__}: {error}"))

    def _read_reply(self, worker: _Worker) -> None:
        try:
            messages = worker.mailbox.receive()
            if not messages:
                return
            values, problem, usable = pickle.loads(messages[0])
            usable = usable and len(messages) == 1
        except (OSError, EOFError):
            self._has_ended(worker)
            return
        except Exception as error:
            # raised by pickle: values of a class that only the worker has, or what the function
            # wrote
            values = None
            problem = f"{type(error).__name__}: {error}"
            usable = False

        call, worker.call = worker.call, None
        if call is None:  # the function, or what it left running, writes to the socket
            self._end(worker)
            return

        self.trace.record("rewards", f"reward of {len(call.samples)} responses", worker.began)
        (
            call.future.set_exception(failure_of(problem, call.samples))
            if problem
            else call.future.set_result(values)
        )
        if not usable:
            self._end(worker)

    def _flush(self, worker: _Worker) -> None:
        """Send the rest of a call."""
        try:
            worker.mailbox.flush()
        except OSError:
            self._has_ended(worker)

    def _has_ended(self, worker: _Worker) -> None:
        call = worker.call
        how = self._end(worker)
        if call is not None:
            self._repeat(call, how)

    def _repeat(self, call: _Call, how: str) -> None:
        if call.died:
            call.future.set_exception(CallFailed(f"{how}, twice"))
        else:
            call.died = True
            self._waiting.appendleft(call)

    def _out_of_time(self, worker: _Worker) -> None:
        call = worker.call
        stack = ""
        with suppress(OSError):
            os.kill(worker.process, STACK_SIGNAL)
            while worker.socket.poll(0.1 if stack else STACK_SECONDS) and (
                chunk := os.read(worker.socket.fileno(), MAX_STACK_BYTES)
            ):
                stack += chunk.decode(errors="replace")

        self._end(worker)
        assert call is not None, "only a call can be late"
        self.trace.record(
            "rewards", f"reward of {len(call.samples)} responses: out of time", worker.began
        )
        call.future.set_exception(out_of_time(self.limit, _innermost(stack)))

    def _fork(self) -> _Worker:
        """Fork a worker.

        Raises OSError or EOFError if the process that forks has ended, and CallFailed if it cannot
        import the function.
        """
        try:
            self._pool.append(_Worker(*self._forks.fork()))
        except ValueError as error:
            raise CallFailed(str(error)) from error
        return self._pool[-1]

    def _end(self, worker: _Worker) -> str:
        """Kill a worker and the processes that it started, and return a text on how it ended."""
        self._pool.remove(worker)
        try:
            return f"the worker {self._forks.end(worker)}"
        except (OSError, EOFError):
            self._end_parent()
            return "the worker has ended"

    def _end_parent(self) -> None:
        """End the process that forks, and the workers with it."""
        if not self._forks.running:
            return
        self._forks.close()
        workers = self._pool
        self._pool = []
        for worker in workers:
            worker.kill()
            if worker.call is not None:
                self._repeat(worker.call, "the worker has ended")


def _innermost(stack: str) -> str:
    """Return the innermost lines of a stack written by faulthandler, up to three.

    Lines of this package are left out.
    """
    frames = [frame for frame in STACK_LINE.findall(stack) if not frame[0].endswith(START_FILES)]
    lines = [f"{file}:{line} ({name})" for file, line, name in frames]
    return " < ".join(lines[:3])
