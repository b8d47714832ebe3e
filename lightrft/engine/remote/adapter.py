"""The engine of a rank that trains: requests and weights go to the ranks that generate."""

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from lightrft.core.engine import Request
from lightrft.core.samples import Completion, Expanded
from lightrft.engine.base import EngineError, EngineSetup, Half
from lightrft.engine.loop import EngineLoop
from lightrft.engine.remote import wire
from lightrft.engine.remote.weights import WeightBroadcast
from lightrft.engine.requests import Sampling
from lightrft.engine.start import FolderEngine
from lightrft.models.parallel.device import grow_segments
from lightrft.models.parallel.processes import RunProcesses
from lightrft.models.weight_sync.stream import bucket_limit

STEP_SECONDS = 0.01
"""Longest time of a step; it waits for requests to end."""


def _refused(self: Any, *args: Any) -> NoReturn:
    """Refuse what the engines on other ranks do by themselves."""
    raise EngineError("engines on other ranks decode, load and interrupt requests by themselves")


class RemoteEngine(FolderEngine):
    """Engine whose calls are answered by the engines of all ranks that generate.

    It takes no memory on this rank. The training ranks make the same calls, each with different
    requests. Engines begin a call when the requests of all ranks are there, while earlier calls
    decode. Weights come between two calls.
    """

    def __init__(self, setup: EngineSetup, processes: RunProcesses):
        """Connect to all engines."""
        grow_segments(setup.device)
        super().__init__(setup)
        self.adapters = None
        if processes.rank == 0:
            adapters = setup.adapters.to_json() if setup.adapters else ""
            processes.store.set(wire.ADAPTERS_KEY, adapters)
            processes.store.set(wire.PRETRAIN, setup.model_path)
        self._inbox: SimpleQueue[tuple[wire.Peer, Any]] = SimpleQueue()
        first = processes.size - processes.rollout_ranks
        step = setup.section.engine_tp_size
        ranks = range(first, processes.size, step)
        self._engines = [wire.connect(processes, rank, self._inbox) for rank in ranks]

        limit = bucket_limit(setup.section.weight_sync_bucket_mb, self.axis, setup.device)
        self._broadcast = WeightBroadcast(processes, setup.device, bucket_bytes=limit)

        # Ranks start with different engines, so that small calls do not all go to the first one.
        self._first = processes.rank % len(self._engines)
        self._call = self._calls_alone = 0
        self._arrived: dict[int, list[wire.Finished]] = {}
        """Call -> completions that have not been read."""
        self._processes = processes
        # Only the ranks that generate know what their engine can do.
        if setup.adapters is not None and processes.store.get(wire.HOLDS_ADAPTERS):
            self.adapters = setup.adapters

    def load_weights(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        version: int,
        *,
        loop: EngineLoop | None = None,
    ) -> None:
        """Send the weights to all engines; they check and verify the weights themselves.

        Return when everything is sent. Requests that run then go on as --weight_update says
        (server.py), so that `loop` makes no difference here.
        """
        self._check_usable()
        if self._processes.rank == 0:
            for engine in self._engines:
                engine.send(wire.LoadWeights(version, self._call))
        # All training ranks gather each weight, and one of each node sends a share of it.
        self._broadcast.send(self._checked(named_tensors))

        self.version = version
        self.weights_valid = True
        self.has_base = self.adapters is not None

    def reset_cache(self) -> None:
        """Do nothing: engines drop the caches when they load weights."""

    def _expanded(self, request: Request) -> Expanded:
        """Return the prompt as it is: the engine expands it."""
        return Expanded(request.token_ids, None)

    def open(self, sampling: Sampling) -> "RemoteLoop":
        """Return a loop that all engines work for; several loops may be open."""
        self._check_can_generate()
        return RemoteLoop(self, sampling)

    def prompts_at_once(self, n: int) -> int:
        """Return this rank's share of the prompts that all engines decode at the same time.

        It waits until they have started.
        """
        capacity = int(self._processes.store.get(wire.CAPACITY)) * len(self._engines)
        return max(1, capacity // n // (self._processes.size - self._processes.rollout_ranks))

    def send(self, requests: list[Request], *, alone: bool) -> int:
        """Send the requests of a call; return the call's number.

        Even a call without requests is sent, because other ranks' requests wait for it, unless this
        rank makes the call `alone`.
        """
        first = self._first
        if alone:
            call = self._calls_alone = self._calls_alone - 1
            first -= call
        else:
            call = self._call = self._call + 1
        if requests:
            self._arrived[call] = []
        for number, engine in enumerate(self._engines):
            chosen = range((number - first) % len(self._engines), len(requests), len(self._engines))
            engine.send(
                wire.Generate(call, [(index, requests[index]) for index in chosen], self.version)
            )
        return call

    def abort(self, calls: Iterable[int]) -> None:
        """End the requests of calls where they are; receive() returns them like any others."""
        for engine in self._engines:
            for call in calls:
                engine.send(wire.Abort(call))

    def receive(self, calls: Collection[int]) -> list[wire.Finished]:
        """Wait a moment until requests of these calls have ended; return all that have."""
        with self._fatal("generate"), suppress(Empty):
            while not any(self._arrived[call] for call in calls):
                self._sort(*self._inbox.get(timeout=STEP_SECONDS))
            while True:
                self._sort(*self._inbox.get_nowait())
        messages = [message for call in calls for message in self._arrived[call]]
        self._arrived |= {call: [] for call in calls}
        return messages

    def forget(self, call: int) -> None:
        """Forget a call whose requests have all been read."""
        del self._arrived[call]

    def _sort(self, peer: wire.Peer, message: Any) -> None:
        if not isinstance(message, wire.Finished):
            # That rank reports why it failed, and that report comes before this one.
            closed = dist.DistNetworkError("a rank of this run has ended")
            raise EngineError(
                f"rank {peer.rank}, which generates, has closed its connection"
            ) from closed
        self._arrived[message.call].append(message)

    _add = _step = _abort = _num_sampled = _load_weights = _refused

    def _leave_cache(self) -> None:
        """Do nothing: engines leave the caches when they load weights."""

    def _num_cached(self) -> int:
        return 0

    def _sleep(self, level: int) -> None:
        """Do nothing: engines on separate ranks never sleep."""

    def _wake(self, half: Half) -> None:
        """Do nothing."""

    def _close(self) -> None:
        for engine in self._engines:
            with suppress(OSError):  # the other rank may have ended before
                engine.send(wire.Closed())
            engine.close()


class RemoteLoop(EngineLoop):
    """Loop of requests that run on other ranks.

    The training ranks call add() equally often, and abort together.
    """

    def __init__(self, engine: RemoteEngine, sampling: Sampling):
        super().__init__(engine, sampling)
        self.remote = engine
        self._calls: dict[int, tuple[int, int]] = {}
        """Call -> (index of the first request in the loop, how many requests have not ended)."""

    load_weights = interrupted = _refused

    def add_alone(self, requests: list[Request]) -> range:
        if requests:
            return self.add(requests, alone=True)
        return range(self.num_requests, self.num_requests)

    def add(self, requests: list[Request], *, alone: bool = False) -> range:
        readable = self.remote.begin_requests(requests, self)
        indices = range(self.num_requests, self.num_requests + len(requests))
        self.num_requests += len(requests)
        call = self.remote.send([replace(each, expanded=None) for each in readable], alone=alone)
        if requests:
            self._calls[call] = indices.start, len(requests)
        self.running |= dict.fromkeys(indices)
        return indices

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Wait a moment until requests have ended; return those that have."""
        ended = []
        for message in self.remote.receive(self._calls):
            first, count = self._calls[message.call]
            self._calls[message.call] = first, count - 1
            if count == 1:
                del self._calls[message.call]
                self.remote.forget(message.call)
            del self.running[first + message.index]
            ended.append((first + message.index, message.completions))
        return ended

    def abort(self, indices: Collection[int] | None = None) -> dict[int, list[Completion]]:
        if indices is not None:
            raise EngineError(
                "the requests of a loop of engines on other ranks are aborted together"
            )
        self.remote.abort(self._calls)
        ended: dict[int, list[Completion]] = {}
        while self.running:
            ended |= self.step()
        return ended
