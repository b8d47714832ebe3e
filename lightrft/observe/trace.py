"""Measure the time and the memory of a step."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from lightrft.parallel.device import GB


class Span(NamedTuple):
    """Phase of a rank from one time to another, both in seconds since the epoch."""

    name: str
    began: float
    ended: float
    idle: bool = False
    """True if the device had nothing to do."""
    track: str = ""
    """Track of the timeline for the span, beside the phases of the rank. Spans of a track may
    overlap."""


def _nothing() -> None:
    pass


class Untraced:
    """A trace that measures nothing, for objects without a trainer."""

    def phase(self, name: str, *, idle: bool = False) -> AbstractContextManager[None]:
        """Return a context for the enclosed code."""
        return nullcontext()

    def record(self, track: str, name: str, began: float) -> None:
        """Ignore what ends now."""


class Trace(Untraced):
    """Measures the wall-clock seconds of each phase of a step, and the memory.

        trace = Trace(peak_memory=..., memory_in_use=..., synchronize=...)
        with trace.phase("generate"):
            with trace.phase("weight_sync"): ...  # time/generate/weight_sync, in time/generate too
        for name, value in trace.step().items():
            metrics.mean(name, value)

    A nested phase is named by the path to it, and the outer phase contains the time. The phases
    without a further slash add up to at most `time/step`. `time/idle_share` is the share of the
    step in phases that leave the device idle.
    """

    def __init__(
        self,
        *,
        peak_memory: Callable[[], int],
        memory_in_use: Callable[[], int],
        synchronize: Callable[[], None] = _nothing,
        on_phase: Sequence[Callable[[str], None]] = (),
    ):
        """Start the clock.

        Memory is in bytes. `synchronize` waits for the device, so that a phase includes the kernels
        that it launched. `on_phase` get the path of each phase that begins, or an empty string
        between phases.
        """
        self.failed = ""
        """Path of the innermost phase that an exception left; empty if there was none."""
        self._peak_memory = peak_memory
        self._memory_in_use = memory_in_use
        self._synchronize = synchronize
        self._on_phase = on_phase
        self._path: list[str] = []
        self._seconds: dict[str, float] = {}
        self._idle_seconds = 0.0
        self._spans: list[Span] = []
        self._step_began = time.perf_counter()
        self._epoch = time.time() - self._step_began

    @property
    def current(self) -> str:
        """Return the path of the current phase, such as `generate/weight_sync`, or ""."""
        return "/".join(self._path)

    @contextmanager
    def phase(self, name: str, *, idle: bool = False) -> Iterator[None]:
        """Measure the enclosed code as this phase; repeated phases of a step add up.

        `idle`: the device has nothing to do meanwhile. An idle phase contains no other one.
        """
        self._path.append(name)
        path = self.current
        for each in self._on_phase:
            each(path)

        began = time.perf_counter()
        try:
            yield
            self._synchronize()
        except BaseException:
            self.failed = self.failed or path
            # The innermost phase gets here first, and that is the one to report.
            raise
        finally:
            ended = time.perf_counter()
            self._seconds[path] = self._seconds.get(path, 0.0) + ended - began
            self._idle_seconds += idle * (ended - began)
            self._spans.append(Span(path, self._epoch + began, self._epoch + ended, idle))
            self._path.pop()

        for each in self._on_phase:
            each(self.current)

    def record(self, track: str, name: str, began: float) -> None:
        """Add what ends now to another track; any thread may call it.

        `began` is in seconds of time.perf_counter().
        """
        self._spans.append(
            Span(name, self._epoch + began, self._epoch + time.perf_counter(), track=track)
        )

    def take_spans(self) -> list[Span]:
        """Return what was recorded since the last call."""
        spans = self._spans
        self._spans = []
        return spans

    def step(self) -> dict[str, float]:
        """Return times and memory since the last call.

        The row has `time/<phase>` and `time/step` in seconds, `time/idle_share`, and
        `memory/peak_gb` and `memory/now_gb` in 1e9 bytes.
        """
        assert not self._path, f"a step ended within the phase {self.current!r}"
        now = time.perf_counter()
        row = {f"time/{path}": seconds for path, seconds in self._seconds.items()}
        row["time/step"] = now - self._step_began
        row["time/idle_share"] = self._idle_seconds / row["time/step"]
        row["memory/peak_gb"] = self._peak_memory() / GB
        row["memory/now_gb"] = self._memory_in_use() / GB
        self._seconds = {}
        self._idle_seconds = 0.0
        self._step_began = now

        return row
