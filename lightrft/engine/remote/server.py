"""The loop of the ranks that generate: they load weights and answer requests of training ranks."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch

from lightrft.core.samples import Completion
from lightrft.engine.base import Engine
from lightrft.engine.loop import EngineLoop
from lightrft.engine.remote import wire
from lightrft.engine.remote.weights import WeightBroadcast
from lightrft.engine.requests import Sampling
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.processes import RunProcesses

WAIT_SECONDS = 1.0
"""Seconds until a rank without work meets the other ranks of the engine again."""
STEPS_PER_LOOK = 4
"""Engine steps between looks for messages. The ranks of an engine have to exchange the messages."""


@dataclass(eq=False)
class EngineServer:
    """Serves the engine of this rank, or of the ranks of `engine.axis`.

    It ends when the training ranks close the connections. All ranks of the engine make the same
    decisions, by the messages that the first of them has received.

    Calls begin in order, each when the requests of all training ranks have arrived, while earlier
    calls decode. Weights that come between two calls wait for the requests that run
    (`--weight_update wait`), or are loaded between two steps. The requests then go on over the
    cache that they have (`in_flight`), or after it was computed again (`in_flight_exact`). A rank
    can also make calls alone, for the turns of episodes. Such a call begins as soon as the engine
    has the weights that the rank had before it.
    """

    engine: Engine
    processes: InitVar[RunProcesses]
    device: InitVar[torch.device]
    announce: Callable[[str], None]
    weight_update: str = "wait"

    def __post_init__(self, processes: RunProcesses, device: torch.device) -> None:
        """Accept the connections of all training ranks, on the first rank of the engine."""
        engine = self.engine
        self.axis: Axis = engine.axis
        capacity = engine.prompts_at_once(1)
        self._inbox: SimpleQueue[tuple[wire.Peer, Any]] = SimpleQueue()
        self._peers: dict[int, wire.Peer] = {}

        if self.axis.rank == 0:
            processes.store.set(wire.CAPACITY, str(capacity))
            processes.store.set(wire.HOLDS_ADAPTERS, "" if engine.adapters is None else "yes")
            self._peers = {peer.rank: peer for peer in wire.accept(processes, self._inbox)}

        self._broadcast = WeightBroadcast(processes, device)
        self._num_peers = processes.size - processes.rollout_ranks
        self._loop: EngineLoop | None = None
        self._owners: dict[int, tuple[int, int, int]] = {}
        """Index in the loop -> (rank, call, index in the rank's call) of each running request."""
        self._calls: dict[int, dict[int, wire.Generate]] = defaultdict(dict)
        """Call -> rank -> requests, for calls that wait for other ranks or for weights."""
        self._alone: list[tuple[int, wire.Generate]] = []
        """Rank and requests of calls that single ranks make, and that wait for weights."""
        self._loads: list[wire.LoadWeights] = []
        self._aborts: list[tuple[int, int]] = []
        """Rank and call of requests to end as soon as the call has begun."""
        self._last_call = 0
        """Number of the last call that has begun."""

    def serve(self) -> None:
        """Begin calls in order, and load weights between them as they come."""
        left = self._num_peers
        while left:
            self.announce("generate" if self._owners else "")  # waiting has no time limit
            for rank, message in self._messages():
                if isinstance(message, wire.Closed):
                    left -= 1
                elif isinstance(message, wire.LoadWeights):
                    self._loads.append(message)
                elif isinstance(message, wire.Abort):
                    self._aborts.append((rank, message.call))
                elif message.call < 0:
                    self._alone.append((rank, message))
                else:
                    self._calls[message.call][rank] = message

            self._advance()
            self._abort()
            for _ in range(STEPS_PER_LOOK):
                if self._owners:
                    self._send(self._loop.step())

            self._advance()

    def _advance(self) -> None:
        while self._proceed():
            pass

    def _proceed(self) -> bool:
        """Load weights or begin a call, whichever is next; return False if neither can be done."""
        if self._alone and self._alone[0][1].version <= self.engine.version:
            rank, message = self._alone.pop(0)
            self._begin(message.call, {rank: message})
            return True
        if self._loads and self._loads[0].after == self._last_call:
            if self._owners and self.weight_update == "wait":
                return False
            self._load(self._loads.pop(0).version)
            return True
        if len(self._calls.get(self._last_call + 1, {})) < self._num_peers:
            return False

        self._last_call += 1
        self._begin(self._last_call, self._calls.pop(self._last_call))
        return True

    def _load(self, version: int) -> None:
        self.announce("generate/weight_sync")
        weights = self._broadcast.receive()
        if not self._owners:
            self.engine.load_weights(weights, version)
        elif self.weight_update == "in_flight":
            self._loop.load_weights(weights, version)
        else:
            with self._loop.interrupted():
                self.engine.load_weights(weights, version)
        self.announce("generate" if self._owners else "")

    def _begin(self, call: int, messages: dict[int, wire.Generate]) -> None:
        chosen = [
            (rank, index, request)
            for rank in sorted(messages)
            for index, request in messages[rank].requests
        ]
        if chosen:
            self._loop = self._loop or self.engine.open(Sampling())
            loop_indices = self._loop.add([request for _, _, request in chosen])
            self._owners |= {
                loop_index: (rank, call, index)
                for loop_index, (rank, index, _) in zip(loop_indices, chosen, strict=True)
            }

    def _abort(self) -> None:
        """End the requests of calls that have begun and are not wanted any longer."""
        # A call that has not begun yet has no requests to end, so it stays in the list.
        waiting = {(rank, message.call) for rank, message in self._alone}
        aborted = {
            pair for pair in self._aborts if pair[1] <= self._last_call and pair not in waiting
        }
        self._aborts = [pair for pair in self._aborts if pair not in aborted]
        indices = [
            index for index, (rank, call, _) in self._owners.items() if (rank, call) in aborted
        ]
        if indices:
            self._send(list(self._loop.abort(indices).items()))

    def _send(self, ended: list[tuple[int, list[Completion]]]) -> None:
        for loop_index, completions in ended:
            rank, call, index = self._owners.pop(loop_index)
            if self.axis.rank == 0:
                with suppress(OSError):  # a rank that ends does not wait for what it began
                    self._peers[rank].send(wire.Finished(call, index, completions))

    def _messages(self) -> list[tuple[int, Any]]:
        """Return (sender, message) of what has arrived, the same on all ranks of the engine."""
        return self.axis.broadcast(self._receive() if self.axis.rank == 0 else [])

    def _receive(self) -> list[tuple[int, Any]]:
        messages = []
        with suppress(Empty):
            if not self._owners:
                messages.append(self._inbox.get(timeout=WAIT_SECONDS))
            while True:
                messages.append(self._inbox.get_nowait())
        return [(peer.rank, message) for peer, message in messages]
