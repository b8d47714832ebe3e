"""The open loop of an engine: requests are added while others decode, and aborts keep the tokens.

An adapter samples all tokens of a request from one distribution. If the first tokens are sampled in
another way, the loop sends one request for them and then one for each continuation, whose prompt is
in the cache. This happens with a temperature for the first token (FIRE: Chen et al., arXiv
2410.21236), and with tokens that must not end the response.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lightrft.core.engine import ABORTED, Ended, Request, derived_seed
from lightrft.core.samples import Completion


class EngineLoop:
    """Requests that an engine completes, made by Engine.open().

        loop = engine.open(sampling)
        loop.add(requests)  # returns their indices; also later, while others decode
        while loop.running:
            for index, completions in loop.step():
                ...
        loop.abort()                            # at any time: index -> completions so far
        loop.load_weights(named_tensors, 5)     # or: go on with other weights, over the same cache
        with loop.interrupted():                # or: go on with other weights and a new cache
            engine.load_weights(named_tensors, 5)

    Ranks that share an engine make the same calls with the same arguments. While requests run, the
    engine refuses other calls.
    """

    def __init__(self, engine: Any, sampling: Any):
        """Open the loop of an Engine; base.py imports this file, so it is not named here."""
        self.engine = engine
        self.sampling = sampling
        self.running: dict[int, _Running] = {}
        """Index of a request that has not ended -> state."""
        self.unread = RuntimeError("its completions were not consumed to the end")
        """What other callers get as the engine's failure while requests run."""
        self.num_requests = self._num_segments = 0
        self._segments: dict[int, _Segment] = {}
        """Key of a request in the adapter -> the segment of a request that it is."""
        self._ended: list[int] = []
        """Requests that turned out to be complete when the loop was interrupted."""

    @property
    def unfinished(self) -> Collection[int]:
        """Return the indices of requests that run."""
        return self.running.keys()

    def prompts_at_once(self, n: int) -> int:
        """Return how many prompts with n samples each the engine decodes at the same time."""
        return max(1, self.engine.prompts_at_once(n))

    def add(self, requests: list[Request]) -> range:
        """Begin requests; return the indices, counted over all requests of the loop.

        Raises ValueError, and begins none, if a request is invalid.
        """
        indices = range(self.num_requests, self.num_requests + len(requests))
        readable = self.engine.begin_requests(requests, self)
        self.num_requests += len(requests)
        with self.engine.generating(self):
            for index, request in zip(indices, readable, strict=True):
                self.running[index] = _Running(request)
                sampling = request.sampling
                if sampling.min_tokens or sampling.first_token_temperature is not None:
                    request = _segment_request(request, 0)
                self._submit(index, 0, request)
        return indices

    def add_alone(self, requests: list[Request]) -> range:
        """Begin requests that only this rank has, or the ranks that share the engine."""
        return self.add(requests)

    def step(self) -> Ended:
        """Continue the samples that run; return (index, `n` completions) of each ended request.

        A step of vllm and hf computes one token of each sample in the batch; a step of sglang takes
        a moment.
        """
        with self.engine.generating(self):
            ended = self._ended
            self._ended = []
            for key, samples in list(self.engine._step()) if self._segments else ():
                segment = self._segments.pop(key)
                # A segment that has ended may be followed by one for each unfinished sample.
                for sample in self.running[segment.index].take(segment, samples, self.engine):
                    self._continue(segment.index, sample)
                if not self.running[segment.index].missing:
                    ended.append(segment.index)
            finished = [(index, self.running.pop(index)) for index in ended]

        return [
            (index, self.engine._cut(state.samples, state.request.sampling.stop))
            for index, state in finished
        ]

    def of_other_ranks(self) -> Ended:
        """Return nothing: no other rank has requests in this loop."""
        return []

    def to_the_end(self) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (index, completions) of each request when it ends, while others still run.

        The engine becomes unusable if the caller stops reading before the end.
        """
        while self.running:
            yield from self.step()

    def abort(self, indices: Collection[int] | None = None) -> dict[int, list[Completion]]:
        """End requests, by default all; return index -> completions so far.

        Unfinished ones have the finish reason `abort`.
        """
        ended = self._withdraw(self.running if indices is None else indices)
        self._ended = [index for index in self._ended if index not in ended]
        return {
            index: self.engine._cut(state.abort(), state.request.sampling.stop)
            for index, state in sorted(ended.items())
        }

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load weights between two steps, while the requests of this loop run.

        Samples go on over the keys and values that they have, so nothing is computed again. An
        engine that keeps the policy of a request goes on with the weights that began it. Later
        requests share no prefix with earlier ones. The next segment of a sample is a later request
        too. Log-probs and versions stay as the weights gave them that sampled the tokens. An error
        makes the engine unusable.
        """
        with self.engine.between_steps(self):
            for key, segment in self._segments.items():
                segment.note_version(self.engine._num_sampled(key), self.engine)
            self.engine.load_weights(named_tensors, version, loop=self)

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Take all requests out of the engine during the context, so that it can load weights.

        Afterwards unfinished samples go on after the tokens that they have, and the keys and values
        are computed again. Log-probs stay as the weights gave them that sampled the tokens.
        """
        withdrawn = self._withdraw(self.running)
        yield
        self.running |= withdrawn
        with self.engine.generating(self):
            for index, state in withdrawn.items():
                for sample in state.unfinished(range(len(state.samples))):
                    self._continue(index, sample)
            self._ended = [index for index, state in withdrawn.items() if not state.missing]

    def _withdraw(self, indices: Collection[int]) -> "dict[int, _Running]":
        """End the segments of requests in the adapter; return the requests with all samples so far.

        They do not run any longer.
        """
        with self.engine.generating(self):
            for key, segment in list(self._segments.items()):
                if segment.index in indices:
                    self.running[segment.index].take(segment, self.engine._abort(key), self.engine)
                    del self._segments[key]
            return {index: self.running.pop(index) for index in list(indices)}

    def _submit(self, index: int, slot: int, request: Request) -> None:
        self._segments[self._num_segments] = _Segment(index, slot, self.engine.version)
        self.running[index].missing += 1
        self.engine._add(self._num_segments, request)
        self._num_segments += 1

    def _continue(self, index: int, slot: int) -> None:
        running = self.running[index]
        self._submit(
            index,
            slot,
            _rest_of(running.request, running.request.seeds[slot], running.samples[slot]),
        )


@dataclass(slots=True)
class _Segment:
    """A request in the adapter: tokens of a caller's request that one distribution yields."""

    index: int
    """Index of the caller's request."""
    slot: int
    """Sample that the segment continues. The first segment of a request has all samples."""
    began_with: int
    """Version of the weights that began the segment."""
    versions: list[list[int]] = field(default_factory=list)
    """For each sample, the versions of the tokens that were sampled before the last load."""

    def note_version(self, counts: list[int], engine: Any) -> None:
        """Note which weights have sampled what is new; samples have `counts` tokens now."""
        version = self.began_with if engine.keeps_policy else engine.version
        self.versions = self.versions or [[] for _ in counts]
        for versions, count in zip(self.versions, counts, strict=True):
            versions += [version] * (count - len(versions))


@dataclass(slots=True)
class _Running:
    """A request in the loop: one segment, then one more for each sample that it left unfinished."""

    request: Request
    samples: list[Completion] = field(default_factory=list)
    missing: int = 0
    """How many segments of the request run."""

    def take(self, segment: _Segment, samples: list[Completion], engine: Any) -> list[int]:
        """Take the completions of a segment that has ended; return the samples still unfinished."""
        self.missing -= 1
        segment.note_version([len(sample.token_ids) for sample in samples], engine)
        for sample, versions in zip(samples, segment.versions, strict=True):
            sample.weight_versions = versions[: len(sample.token_ids)]
        if self.samples:
            self.samples[segment.slot] = _concatenate(self.samples[segment.slot], samples[0])
            return self.unfinished([segment.slot])
        self.samples = samples
        return self.unfinished(range(len(samples)))

    def abort(self) -> list[Completion]:
        """Return the completions, with the finish reason `abort` for unfinished ones."""
        for slot in self.unfinished(range(len(self.samples))):
            self.samples[slot].finish_reason = ABORTED
        return self.samples

    def unfinished(self, slots: Iterable[int]) -> list[int]:
        """Return which of these samples were aborted, or have only first tokens."""
        limit = self.request.sampling.max_tokens
        return [
            slot
            for slot in slots
            if self.samples[slot].finish_reason != "stop"
            and len(self.samples[slot].token_ids) < limit
        ]


def _segment_request(request: Request, length: int) -> Request:
    """Build the request for the next tokens that one distribution yields, after `length` tokens."""
    sampling = request.sampling
    hot = None if length else sampling.first_token_temperature
    must_not_end = length < sampling.min_tokens
    most = sampling.max_tokens - length
    if must_not_end:
        most = min(most, sampling.min_tokens - length)
    changed = {"max_tokens": 1 if hot is not None else most, "first_token_temperature": None}
    if hot is not None:
        changed["temperature"] = hot

    # Early tokens must not end the response; afterwards the end tokens are allowed again.
    if sampling.min_tokens:
        early = (
            sampling.truncation.while_early.banned if must_not_end else sampling.banned_token_ids
        )
        changed |= {"min_tokens": 0, "end_token_ids": (), "banned_token_ids": early}

    return replace(request, sampling=replace(sampling, **changed))


def _rest_of(request: Request, seed: int, completion: Completion) -> Request:
    """Build the request that continues a sample.

    The seed is derived anew. The noise is therefore independent of the tokens before, even in an
    engine that counts positions from the end of the prompt.
    """
    length = len(completion.token_ids)
    seeds = (derived_seed(seed, length) if length else seed,)
    rest = replace(request, sampling=replace(request.sampling, n=1), seeds=seeds)
    segment = _segment_request(rest, length)
    return segment.followed_by(completion.token_ids) if length else segment


def _concatenate(first: Completion, rest: Completion) -> Completion:
    """Join the first tokens of a sample and the continuation."""
    return replace(
        rest,
        token_ids=first.token_ids + rest.token_ids,
        logprobs=first.logprobs + rest.logprobs,
        num_cached_tokens=first.num_cached_tokens,
        drafts=first.drafts.plus(rest.drafts),
        weight_versions=first.weight_versions + rest.weight_versions,
    )
