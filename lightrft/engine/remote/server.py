"""Loop of the ranks that generate: they load the weights and answer the requests that ranks which train send."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch

from lightrft.engine.base import Engine
from lightrft.engine.remote.weights import WeightBroadcast
from lightrft.engine.remote.wire import Closed, Finished, Generate, LoadWeights, Peer, accept
from lightrft.engine.requests import Request, Sampling
from lightrft.parallel.collectives import Axis
from lightrft.parallel.processes import RunProcesses

WAIT_SECONDS = 1.0
"""Seconds after which a rank that has nothing to do meets the other ranks of its engine."""


class EngineServer:
    """Serves the engine of this rank, or of the ranks of `engine.axis`, until the ranks that train close their connections."""

    def __init__(self, engine: Engine, processes: RunProcesses, device: torch.device, announce: Callable[[str], None]):
        """Accept the connections of all ranks that train, on the first rank of the engine."""
        self.engine, self._announce = engine, announce
        self.axis: Axis = engine.axis
        self._inbox: SimpleQueue[tuple[Peer, Any]] = SimpleQueue()
        self._peers = accept(processes, self._inbox) if self.axis.rank == 0 else []
        self._broadcast = WeightBroadcast(processes, device)
        self._num_peers = processes.size - processes.rollout_ranks
        self._calls: dict[int, dict[int, Generate]] = defaultdict(dict)
        """Call -> rank -> its requests, for calls that wait for the requests of other ranks or for weights."""
        self._loads: list[LoadWeights] = []
        self._answered = 0
        """Number of the last call that was answered."""

    def serve(self) -> None:
        """Answer calls in their order, and load weights as they come."""
        left = self._num_peers
        while left:
            self._announce("")  # waiting has no time limit
            for rank, message in self._messages():
                if isinstance(message, Closed):
                    left -= 1
                elif isinstance(message, LoadWeights):
                    self._loads.append(message)
                else:
                    self._calls[message.call][rank] = message
            while self._proceed():
                pass

    def _proceed(self) -> bool:
        """Load weights or answer a call, whichever is next; return False if its parts have not all arrived."""
        if self._loads and self._loads[0].after == self._answered:
            self._announce("generate/weight_sync")
            self.engine.load_weights(self._broadcast.receive(), self._loads.pop(0).version)
            return True
        parts = self._calls.get(self._answered + 1, {})
        if len(parts) < self._num_peers or next(iter(parts.values())).version > self.engine.version:
            return False
        self._announce("generate")
        self._answered += 1
        self._answer(self._calls.pop(self._answered))
        return True

    def _messages(self) -> list[tuple[int, Any]]:
        """Return the messages that have arrived, with the ranks that sent them; the same on all ranks of the engine."""
        messages = []
        if self.axis.rank == 0:
            messages = self._arrived()
        return self.axis.broadcast(messages)

    def _arrived(self) -> list[tuple[int, Any]]:
        found = []
        try:
            found.append(self._inbox.get(timeout=WAIT_SECONDS))
            while not self._inbox.empty():
                found.append(self._inbox.get())
        except Empty:
            pass
        return [(peer.rank, message) for peer, message in found]

    def _answer(self, parts: dict[int, Generate]) -> None:
        owners = [(rank, index) for rank in sorted(parts) for index, _ in parts[rank].requests]
        requests: list[Request] = [request for rank in sorted(parts) for _, request in parts[rank].requests]
        peers = {peer.rank: peer for peer in self._peers}
        for place, completions in self.engine.stream(requests, Sampling()):
            rank, index = owners[place]
            if self.axis.rank == 0:
                with suppress(OSError):  # a rank that ends does not wait for what it began
                    peers[rank].send(Finished(self._answered, index, completions))
