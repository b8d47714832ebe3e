"""Start and end SGLang's processes without side effects on this one."""

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
"""Longest time until a waiting call notices that one of SGLang's processes has died."""
CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""Variable with the cores of each process of an engine. A default is not kept, because another
engine may have more processes."""
LOAD_FILES = "/dev/shm/sglang_loads_"
"""Prefix of the 16 kB files where SGLang's processes publish the load. They never remove a file."""


@contextmanager
def contain_start(num_ranks: int, dtype: str, *, sleeps: bool) -> Iterator[None]:
    """Contain SGLang's start with `num_ranks` tensor-parallel ranks.

    Convolutions of hybrids keep earlier inputs in `dtype`; SGLang's default is bfloat16. CUDA
    graphs, 1 to 3 GB, leave the device with the rest of an engine that `sleeps`. If the start
    fails, the processes that it has started are ended.
    """
    before = set(psutil.Process().children())
    with _settings_kept():
        os.environ.setdefault(CORES, _cores_of_processes(num_ranks))
        os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", dtype)
        os.environ.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", str(int(sleeps)))
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
    """Unlink the files where these processes publish the load.

    The memory is freed when the processes end. Versions of SGLang without such files have none
    open.
    """
    for process in processes:
        try:
            paths = [file.path for file in process.open_files()]
        except psutil.Error:  # the process has ended
            continue
        for path in paths:
            if path.startswith(LOAD_FILES):
                Path(path).unlink(missing_ok=True)


def raise_engine_error(number: int, frame: Any) -> None:
    """Raise EngineError on SIGQUIT, the signal of dying SGLang processes.

    SGLang's own handler would kill this process silently.
    """
    raise EngineError("a process of SGLang died; the log above has its message")


class NoHandlers:
    """Empty signal handlers for SGLang's event loop; the usual ones would end this process."""

    def __init__(self, tokenizer_manager: Any): ...

    def sigterm_handler(self, number: int | None = None, frame: Any = None) -> None: ...

    def running_phase_sigquit_handler(
        self, number: int | None = None, frame: Any = None
    ) -> None: ...


class Loop:
    """SGLang's event loop, left at intervals because it swallows exceptions of signal handlers."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.runs = self.dead = False

    def task(self, awaitable: Awaitable) -> asyncio.Task:
        """Return a task that continues whenever the loop runs."""
        return asyncio.ensure_future(awaitable, loop=self.loop)

    def run_until_complete(self, awaitable: Awaitable) -> Any:
        task = self.task(awaitable)
        self.runs = True
        try:
            while not task.done() and not self.dead:
                self.loop.run_until_complete(asyncio.wait({task}, timeout=SECONDS_TO_NOTICE))
        finally:
            self.runs = False
        if self.dead:
            raise_engine_error(signal.SIGQUIT, None)
        return task.result()

    def on_death(self, number: int, frame: Any) -> None:
        self.dead = True
        if not self.runs:
            raise_engine_error(number, frame)


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Restore what SGLang's start changes in this process.

    That is the environment, signals, the start method, and the state of `random`. It also hides
    from SGLang's processes that torchrun started this one, because they would wait for torchrun's
    store.
    """
    environment = dict(os.environ)
    handler = signal.getsignal(signal.SIGTERM)
    state = random.getstate()
    start_method = multiprocessing.get_start_method(allow_none=True)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)

    try:
        yield
    finally:
        # SGLang reads its own variables later, so these may stay.
        added = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("SGLANG") and name != CORES
        }
        os.environ.clear()
        os.environ.update(environment | added)
        multiprocessing.set_start_method(start_method, force=True)
        signal.signal(signal.SIGTERM, handler)
        random.setstate(state)


def _cores_of_processes(tp: int) -> str:
    """Divide this process's cores among `tp` processes, such as `0,1|2,3`.

    Processes share one if there are too few.
    """
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(",".join(map(str, cores[rank::tp] or cores[:1])) for rank in range(tp))
