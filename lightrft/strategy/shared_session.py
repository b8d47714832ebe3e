"""Share requests: of several ranks in one engine, or of one data replica in several engines."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from lightrft.core.engine import Ended, Request
from lightrft.core.samples import Completion
from lightrft.data.loader import share_of
from lightrft.engine.loop import EngineLoop
from lightrft.models.parallel.collectives import Axis


@dataclass(eq=False)
class SharedSession:
    """Gathers the requests of the ranks that share an engine, and sorts the completions.

    Ranks that share an engine call add(), step() and abort() together, with requests of their own.
    Ranks of one data replica pass the same requests; each submits its share of them, and
    of_other_ranks() returns the rest.
    """

    loop: EngineLoop
    engine: Axis
    model_parallel: Axis
    num_requests: int = field(default=0, init=False)
    _index_of: dict[int, int] = field(default_factory=dict, init=False)
    """Index in the loop -> index of this rank's request, until it has ended."""
    _answers: dict[int, list[Completion]] = field(default_factory=dict, init=False)
    """Completions of this rank's share, if others need them."""

    @property
    def running(self) -> list[int]:
        """Return the loop's indices of requests that run, of all ranks of the engine."""
        return list(self.loop.running)

    @property
    def unfinished(self) -> set[int]:
        """Return the indices of requests that this rank has submitted and that run."""
        return {self._index_of[index] for index in self.loop.running if index in self._index_of}

    def on_any_rank(self, flag: bool) -> bool:
        """Return True if the flag is True on a rank of the engine; all of them call it together."""
        return any(self.engine.gather(flag))

    def prompts_at_once(self, n: int) -> int:
        """Return how many prompts with n samples each decode at once in a replica's engines."""
        prompts = self.loop.engine.prompts_at_once(n)
        return max(1, prompts * self.model_parallel.size // self.engine.size)

    def add(self, requests: list[Request]) -> range:
        """Begin requests that all ranks of the data replica pass; return the indices."""
        ranks = self.model_parallel
        share = share_of(ranks.rank, ranks.size, len(requests))
        indices = self._submit(requests[share.start : share.stop], self.loop.add)
        return self._number(indices, share.start, len(requests))

    def add_local(self, requests: list[Request]) -> range:
        """Begin requests of this rank alone, while others may add none."""
        return self._number(self._submit(requests, self.loop.add_alone), 0, len(requests))

    def _submit(self, local: list[Request], add: Callable[[list[Request]], range]) -> range:
        """Begin the requests of all ranks of the engine; return the loop's indices of this rank."""
        by_rank = self.engine.gather(local)
        first = sum(len(others) for others in by_rank[: self.engine.rank])
        indices = add([request for others in by_rank for request in others])
        return indices[first : first + len(local)]

    def _number(self, indices: range, start: int, count: int) -> range:
        """Number `count` requests; this rank has submitted some of them, from `start` on."""
        first = self.num_requests
        self.num_requests += count
        self._index_of |= dict(zip(indices, range(first + start, first + count), strict=False))
        return range(first, first + count)

    def step(self) -> Ended:
        """Let the engine do a step; return this rank's requests that have ended."""
        return self._local(self.loop.step())

    def drop(self, indices: Collection[int]) -> None:
        """End requests of this rank, and those that the other ranks of the engine name."""
        local = {index for index, number in self._index_of.items() if number in indices}
        self._local(list(self.loop.abort(set().union(*self.engine.gather(local))).items()))

    def abort(self) -> dict[int, list[Completion]]:
        """End all requests in the engine; return this rank's with the completions so far."""
        return dict(self._local(list(self.loop.abort().items())))

    def of_other_ranks(self) -> Ended:
        """Return what other ranks of the data replica have submitted, when all have ended."""
        return [
            (index, completions)
            for others in self.model_parallel.gather(self._answers)
            for index, completions in others.items()
            if index not in self._answers
        ]

    def to_the_end(self) -> Ended:
        """Return all requests of this rank, when all have ended."""
        finished: Ended = []
        while self.running:
            finished += self.step()
        return finished + self.of_other_ranks()

    def _local(self, ended: Ended) -> Ended:
        local = [
            (self._index_of.pop(index), completions)
            for index, completions in ended
            if index in self._index_of
        ]
        if self.model_parallel.size > 1:
            self._answers |= dict(local)
        return local
