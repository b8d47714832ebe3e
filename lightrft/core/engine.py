"""What a step needs of an engine: a loop that takes requests while others decode."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor

from lightrft.core.samples import Completion

ABORTED = "abort"
"""Finish reason of a sample that was aborted."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that a response is sampled from, and where it ends."""

    n: int = 1
    """Samples of each prompt; they share the prefill."""
    max_tokens: int = 1024
    temperature: float = 1.0
    """0 is greedy."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, as the tokenizer's end token does; the token itself is kept."""

    def after(self, num_tokens: int) -> Self:
        """Return the parameters for the rest of a response that has tokens already."""
        return replace(self, max_tokens=self.max_tokens - num_tokens)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete."""

    token_ids: list[int]
    sampling: Sampling
    seeds: tuple[int, ...]
    """One seed for each sample. It alone determines the noise, whatever the batch and the rank."""
    group: int | None = None
    """Number that the requests of a group have in common."""
    multi_modal: dict[str, Any] = field(default_factory=dict)


def derived_seed(*values: int | str) -> int:
    """Return a seed of 63 bits from all values in order, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest()) >> 1


Ended = list[tuple[int, list[Completion]]]
"""(index of a request, its n completions) of requests that have ended."""


class RequestLoop(Protocol):
    """Requests that an engine completes. Ranks that share an engine make the same calls."""

    @property
    def running(self) -> Collection[int]:
        """Indices of requests that run in the engine, of all ranks that share it."""

    @property
    def unfinished(self) -> Collection[int]:
        """Indices of requests of this rank that run."""

    def add(self, requests: list[Request]) -> range:
        """Begin requests; return their indices, counted over all requests of the loop."""

    def step(self) -> Ended:
        """Continue the samples that run; return what has ended."""

    def abort(self) -> dict[int, list[Completion]]:
        """End all requests; unfinished completions have the finish reason `abort`."""

    def of_other_ranks(self) -> Ended:
        """Return what other ranks of this data replica have completed."""


class Engine(Protocol):
    """Generates with a copy of the actor's weights, and may release the memory while it sleeps.

    The order of calls in a step: wake("weights"), load_weights(), wake("kv_cache"), open(), and
    sleep(). Everything that an engine can get wrong is tested by `lightrft.engines.testing`.
    """

    name: ClassVar[str]
    version: int
    """Version of the weights in use; completions carry it."""

    def open(self, sampling: Sampling) -> RequestLoop: ...

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load a complete set of weights: Hugging Face names, full tensors."""

    def sleep(self, level: int | None = None) -> None: ...

    def wake(self, half: str) -> None: ...

    def reset_cache(self) -> None: ...

    def close(self) -> None: ...


class Generates(Protocol):
    """The least that an engine can be."""

    def generate(self, requests: list[Request]) -> list[list[Completion]]: ...


class WholeRequests:
    """The loop of an engine that answers all waiting requests in one call, and cannot be stopped.

    It is enough for an engine in this process that decodes a batch to the end.
    """

    def __init__(self, engine: Generates):
        self.engine = engine
        self.running: dict[int, Request] = {}
        self._added = 0

    @property
    def unfinished(self) -> Collection[int]:
        return self.running

    def add(self, requests: list[Request]) -> range:
        indices = range(self._added, self._added + len(requests))
        self._added = indices.stop
        self.running.update(zip(indices, requests, strict=True))
        return indices

    def step(self) -> Ended:
        indices, requests = list(self.running), list(self.running.values())
        self.running = {}
        return list(zip(indices, self.engine.generate(requests), strict=True)) if requests else []

    def abort(self) -> dict[int, list[Completion]]:
        ended, self.running = self.running, {}
        return {index: [Completion([], [], ABORTED) for _ in ended[index].seeds] for index in ended}

    def of_other_ranks(self) -> Ended:
        return []
