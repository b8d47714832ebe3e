"""What a step needs of an engine: a loop that takes requests while others decode."""

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from torch import Tensor

from lightrft.core.samples import Completion, Expanded

MEDIA_NAMES = {"images": "image", "videos": "video", "audios": "audio"}
"""Key of a medium in a request -> name in placeholders, flags, and prompts for one engine."""
ABORTED = "abort"
"""Finish reason of a sample that was aborted."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """Says how an engine samples responses; `engine/requests.py` adds what other engines can do."""

    n: int = 1
    """Samples of each prompt; they share the prefill."""
    max_tokens: int = 1024
    temperature: float = 1.0
    """Temperature of the samples; 0 is greedy."""

    def after(self, num_tokens: int) -> Self:
        """Return the parameters for the rest of a response that has tokens already."""
        return replace(self, max_tokens=self.max_tokens - num_tokens)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete.

    Request([4, 86, 104, 97, 116, 63], multi_modal={"images": [image]})  # 4 stands for an image
    """

    token_ids: list[int]
    """Tokens of the prompt, with one placeholder for each image, video or clip, as a chat template
    writes it."""
    multi_modal: dict[str, Any] = field(default_factory=dict)
    """Lists under `images`, `videos` and `audios`, in the order of the placeholders and in any form
    that the engine accepts."""
    sampling: Decoding | None = None
    """Sampling parameters that replace the loop's, except for the seed."""
    seeds: tuple[int, ...] = ()
    """One seed for each sample, from derived_seed(). It alone determines the sample's noise,
    whatever the batch and the engine. If empty, the engine derives seeds from the seed of the loop
    and the index of the request."""
    group: int | None = None
    """Number that the requests of a group have in common; --speculative group drafts from them.
    None: the samples of the request are a group."""
    expanded: Expanded | None = None
    """Prompt with expanded media, set by the engine."""

    @property
    def prompt(self) -> list[int]:
        """Return the tokens that the model reads."""
        return self.expanded.token_ids if self.expanded else self.token_ids

    def followed_by(self, token_ids: list[int]) -> Self:
        """Return the request with tokens appended to the prompt."""
        expanded = self.expanded and replace(
            self.expanded, token_ids=self.expanded.token_ids + token_ids
        )
        return replace(self, token_ids=self.token_ids + token_ids, expanded=expanded)


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


class LocalEngine(Protocol):
    """An engine in the process of the trainer, with a copy of the actor's weights."""

    def open(self, sampling: Decoding) -> RequestLoop:
        """Return a loop; `sampling` is for requests that bring none."""

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load all weights; completions carry the version."""


@dataclass(eq=False)
class WholeRequests:
    """The loop of an engine that answers all waiting requests in one call, and cannot be stopped.

    It is enough for an engine in this process that decodes a batch to the end.
    """

    generate: Callable[[list[Request]], list[list[Completion]]]
    running: dict[int, Request] = field(default_factory=dict, init=False)
    _added: int = field(default=0, init=False)

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
        return list(zip(indices, self.generate(requests), strict=True)) if requests else []

    def abort(self) -> dict[int, list[Completion]]:
        ended, self.running = self.running, {}
        return {index: [Completion([], [], ABORTED) for _ in ended[index].seeds] for index in ended}

    def of_other_ranks(self) -> Ended:
        return []
