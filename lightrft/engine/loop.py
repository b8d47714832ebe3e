"""Open loop of an engine: requests are added while others decode, and an abort keeps what was sampled.

A request with a temperature of its own for the first token (FIRE: Chen et al., arXiv 2410.21236) becomes one for the first
tokens, and then one for each continuation, for which the prompt is in the cache.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from lightrft.engine.requests import Request, Sampling, derived_seed
from lightrft.types import Completion

ABORTED = "abort"
"""Finish reason of a sample that was aborted."""


class Completes(Protocol):
    """What is called of a loop's engine (base.py)."""

    def prompts_at_once(self, n: int) -> int: ...

    def begin_requests(self, requests: list[Request], loop: "RequestLoop") -> list[Request]: ...

    def generating(self, loop: "RequestLoop") -> AbstractContextManager[None]: ...

    def _add(self, key: int, request: Request) -> None: ...

    def _step(self) -> Iterable[tuple[int, list[Completion]]]: ...

    def _abort(self, key: int) -> list[Completion]: ...

    def _cut(self, samples: list[Completion], stop: tuple[str, ...]) -> list[Completion]: ...


class RequestLoop:
    """Requests that an engine completes; Engine.open() makes it.

        loop = engine.open(sampling)
        loop.add(requests)                      # returns their indices; also later, while others decode
        while loop.running:
            for index, completions in loop.step():
                ...
        loop.abort()                            # at any time: index -> completions so far

    Ranks that share an engine make the same calls with the same arguments. While requests run, the engine refuses other calls.
    """

    def __init__(self, engine: Completes, sampling: Sampling):
        self.engine, self.sampling = engine, sampling
        self.running: dict[int, _Running] = {}
        """Index of a request -> its state, for those that have not ended."""
        self.unread = RuntimeError("its completions were not consumed to the end")
        """Failure that the engine has for other callers while requests run."""
        self.num_requests = self._num_parts = 0
        self._parts: dict[int, tuple[int, int]] = {}
        """Key of a request in the adapter -> (index of the caller's request, sample that it continues)."""

    def add(self, requests: list[Request]) -> range:
        """Begin requests; return their indices, which count all requests of the loop. Raises ValueError, and begins none, if a
        request is invalid.
        """
        indices = range(self.num_requests, self.num_requests + len(requests))
        readable = self.engine.begin_requests(requests, self)
        self.num_requests += len(requests)
        with self.engine.generating(self):
            for index, request in zip(indices, readable, strict=True):
                self.running[index] = _Running(request)
                hot = request.sampling.first_token_temperature is not None
                self._submit(index, 0, _first_token(request) if hot else request)
        return indices

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Continue the samples that run; return (index, its `n` completions) of each request that has ended.

        A step of vllm and hf computes one token of each sample in the batch; one of sglang takes a moment.
        """
        with self.engine.generating(self):
            ended = [self._ended(*self._parts.pop(key), samples) for key, samples in list(self.engine._step())]
        return [each for each in ended if each is not None]

    def abort(self) -> dict[int, list[Completion]]:
        """End all requests; return index -> its completions so far. Unfinished ones have the finish reason `abort`."""
        with self.engine.generating(self):
            for key, (index, place) in self._parts.items():
                self.running[index].take(place, self.engine._abort(key))
            self._parts.clear()
            running = self.running.copy()
            self.running.clear()
        return {index: self.engine._cut(each.aborted(), each.request.sampling.stop) for index, each in sorted(running.items())}

    def _submit(self, index: int, place: int, request: Request) -> None:
        self._parts[self._num_parts] = index, place
        self.running[index].missing += 1
        self.engine._add(self._num_parts, request)
        self._num_parts += 1

    def _ended(self, index: int, place: int, samples: list[Completion]) -> tuple[int, list[Completion]] | None:
        """Take what a part of a request returned; return the request's completions if it was the last part."""
        running = self.running[index]
        for sample, rest in running.continued() if running.take(place, samples) else ():
            self._submit(index, sample, rest)
        if running.missing:
            return None
        del self.running[index]
        return index, self.engine._cut(running.samples, running.request.sampling.stop)


@dataclass(slots=True)
class _Running:
    """A request in the loop: one part, or with first_token_temperature its first tokens, and then one part for each sample."""

    request: Request
    samples: list[Completion] = field(default_factory=list)
    missing: int = 0
    """Number of its parts that run."""

    def take(self, place: int, samples: list[Completion]) -> bool:
        """Take the completions of a part that has ended; return True if they are those of the first part."""
        self.missing -= 1
        first = not self.samples
        if first:
            self.samples = samples
        else:
            self.samples[place] = _concatenated(self.samples[place], samples[0])
        return first

    def continued(self) -> Iterator[tuple[int, Request]]:
        """Yield the samples that have only their first token, each with the request that continues it."""
        if self.request.sampling.first_token_temperature is None:
            return
        for place in self._unfinished():
            yield place, _rest_of(self.request, self.request.seeds[place], self.samples[place])

    def aborted(self) -> list[Completion]:
        """Return the completions, with the finish reason `abort` for samples that end after their first token only."""
        for place in self._unfinished():
            self.samples[place].finish_reason = ABORTED
        return self.samples

    def _unfinished(self) -> Iterable[int]:
        limit = self.request.sampling.max_tokens
        return [place for place, sample in enumerate(self.samples)
                if sample.finish_reason == "length" and len(sample.token_ids) < limit]  # fmt: skip


def _first_token(request: Request) -> Request:
    """Build the request for the first tokens."""
    sampling = request.sampling
    first = replace(sampling, max_tokens=1, temperature=sampling.first_token_temperature, first_token_temperature=None)
    return replace(request, sampling=first)


def _rest_of(request: Request, seed: int, begun: Completion) -> Request:
    """Build the request that continues a sample. A derived seed makes its noise independent of the first token's, also in an
    engine that counts positions from the end of the prompt.
    """
    sampling = request.sampling
    rest = replace(sampling, n=1, max_tokens=sampling.max_tokens - 1, first_token_temperature=None)
    return replace(request.followed_by(begun.token_ids), sampling=rest, seeds=(derived_seed(seed, len(begun.token_ids)),))


def _concatenated(first: Completion, rest: Completion) -> Completion:
    """Join the first token of a sample and its continuation."""
    return replace(rest, token_ids=first.token_ids + rest.token_ids, logprobs=first.logprobs + rest.logprobs,
                   num_cached_tokens=first.num_cached_tokens)
