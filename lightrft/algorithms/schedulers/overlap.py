"""Compute model outputs for complete groups while the engines decode others (--overlap)."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch

from lightrft.core.groups import Group
from lightrft.core.metrics import Untraced

Compute = Callable[[list[Group]], None]
"""Function that computes the outputs of complete groups. All ranks call it together, each with
groups of its own."""
CHUNKS = 4
"""Outputs are computed whenever this fraction of a round, one in CHUNKS, is complete."""


class Overlap:
    """A thread that computes while the main thread steps the engine.

    Meanwhile the main thread must not use the models or their process groups. All ranks begin the
    same calls in the same order.
    """

    def __init__(self, compute: Compute, device: torch.device, trace: Untraced):
        self.compute = compute
        self.device = device
        self.trace = trace
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._thread = ThreadPoolExecutor(1, "overlap")
        self._futures: list[Future[None]] = []

    def begin(self, groups: list[Group]) -> None:
        """Begin to compute the outputs of complete groups."""
        ready = None
        if self._stream is not None:
            ready = torch.accelerator.current_stream(self.device).record_event()
        self._futures.append(self._thread.submit(self._compute, groups, ready))

    def finish(self) -> None:
        """Wait for all calls; raise the error of the first one that failed."""
        futures = self._futures
        self._futures = []
        for future in futures:
            future.result()

    def _compute(self, groups: list[Group], ready: torch.Event | None) -> None:
        began = time.perf_counter()
        with self._after(ready):
            self.compute(groups)
        self.trace.record("overlap", "outputs", began)

    def _after(self, ready: torch.Event | None) -> AbstractContextManager:
        """Return a context on the thread's stream, which first waits for the main thread's work."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(ready)
        return self._stream
