"""How SGLang's processes start and end without taking this one along."""

import asyncio
import multiprocessing
import os
import random
import signal
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from lightrft.engine.base import EngineError

SECONDS_TO_NOTICE = 1.0
"""So late may the death of one of SGLang's processes be seen in a call that waits for it."""
CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""Which cores each process of one engine has; another engine may have more processes."""
LOAD_FILES = "/dev/shm/sglang_loads_"
"""The files of 16 kB in which SGLang's processes publish how busy they are, and which they never remove begin so."""


@contextmanager
def contained(num_ranks: int) -> Iterator[None]:
    """Around its start, with so many tensor-parallel ranks. What has started is ended where another part fails."""
    before = set(psutil.Process().children())
    with _settings_kept():
        os.environ.setdefault(CORES, _cores_of_each(num_ranks))
        try:
            yield
        except BaseException:
            kill(set(psutil.Process().children()) - before)
            raise


def kill(processes: set[psutil.Process]) -> None:
    family = {one for process in processes for one in (process, *process.children(recursive=True))}
    unlink_load_files(family)
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=30)


def unlink_load_files(processes: Iterable[psutil.Process]) -> None:
    """Remove the names of the files in which these processes publish their load; their memory goes with the processes.

    A version of SGLang without such files has none open.
    """
    for process in processes:
        try:
            paths = [file.path for file in process.open_files()]
        except psutil.Error:  # it has ended
            continue
        for path in paths:
            if path.startswith(LOAD_FILES):
                Path(path).unlink(missing_ok=True)


def died(number: int, frame: Any) -> None:
    """SGLang's processes announce their end with SIGQUIT; its own handler would kill this process without a word."""
    raise EngineError("a process of SGLang died; what it said stands above")


class NoHandlers:
    """For the event loop, which calls them beside those of this process: SGLang's would end it."""

    def __init__(self, tokenizer_manager: Any): ...

    def sigterm_handler(self, number: int | None = None, frame: Any = None) -> None: ...

    def running_phase_sigquit_handler(self, number: int | None = None, frame: Any = None) -> None: ...


class Loop:
    """SGLang's event loop: the loop itself lets no exception of a signal's handler through, so it is left now and then."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.runs = self.dead = False

    def run_until_complete(self, awaitable: Awaitable) -> Any:
        task = asyncio.ensure_future(awaitable, loop=self.loop)
        self.runs = True
        try:
            while not task.done() and not self.dead:
                self.loop.run_until_complete(asyncio.wait({task}, timeout=SECONDS_TO_NOTICE))
        finally:
            self.runs = False
        if self.dead:
            died(signal.SIGQUIT, None)
        return task.result()

    def on_death(self, number: int, frame: Any) -> None:
        self.dead = True
        if not self.runs:
            died(number, frame)


@contextmanager
def _settings_kept() -> Iterator[None]:
    """SGLang's start changes the whole process: environment, signals, how children start, the state of `random`.

    And its processes must not see that torchrun started this one: they would wait for torchrun's store.
    """
    environment, handler, state = dict(os.environ), signal.getsignal(signal.SIGTERM), random.getstate()
    start_method = multiprocessing.get_start_method(allow_none=True)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        yield
    finally:
        own = {name: value for name, value in os.environ.items() if name.startswith("SGLANG") and name != CORES}
        os.environ.clear()
        os.environ.update(environment | own)
        multiprocessing.set_start_method(start_method, force=True)
        signal.signal(signal.SIGTERM, handler)
        random.setstate(state)


def _cores_of_each(tp: int) -> str:
    """`0,1|2,3`: this process's cores, divided among `tp` processes; they share one where there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(",".join(map(str, cores[rank::tp] or cores[:1])) for rank in range(tp))
