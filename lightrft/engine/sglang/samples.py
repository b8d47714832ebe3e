"""Turn requests into SGLang's requests, and SGLang's results into completions."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrft.core.engine import ABORTED, Request
from lightrft.core.samples import Completion
from lightrft.engine.base import EngineError
from lightrft.engine.model_info import Vocabulary
from lightrft.engine.requests import Sampling
from lightrft.engine.sglang.sampling import Truncate
from lightrft.engine.sglang.shim import SGLangShim
from lightrft.engine.stops import StopStrings
from lightrft.models.logits.truncation import without_padding

LOOK_EVERY = 8
"""Tokens between checks for stop strings; a check can abort a request. Without any it is RARELY."""
RARELY = 2**30


class Samples:
    """Requests that run in SGLang's processes.

    Requests that begin together are one task of SGLang's event loop, and arrive as one message.
    The batches, and with them the rounding of log-probs, then do not depend on timing.
    """

    def __init__(self, shim: SGLangShim, vocabulary: Vocabulary):
        self.shim = shim
        self.vocabulary = vocabulary
        self.running: dict[int, _Running] = {}
        """Key of a request -> state."""
        self.waiting: list[_Running] = []
        self.ended: list[int] = []
        self.tasks: set[asyncio.Task] = set()
        self.num_loads = 0
        """How many loads had requests running: the salt of what SGLang's cache contains."""
        self.counts: dict[str, int] = {}
        """While SGLang is paused: name of a request there -> number of tokens."""

    def add(self, key: int, request: Request) -> None:
        """Add a request, to begin with the next step."""
        self.running[key] = _Running(key, request)
        self.waiting.append(self.running[key])

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Let SGLang work until a request has ended, or for a moment; return the ended ones."""
        self._work()
        ended, self.ended = self.ended, []
        return [(key, self.running.pop(key).completions) for key in ended]

    def abort(self, key: int) -> list[Completion]:
        """End a request; return the completions so far."""
        running = self.running[key]
        running.aborted = True
        while key not in self.ended:
            for name in list(running.names):
                self.shim.abort(name)  # SGLang ignores this until it knows the request
            self._work()
        self.ended.remove(key)
        return self.running.pop(key).completions

    def pause(self) -> None:
        """Stop SGLang between two steps; what is sent afterwards has a salt for other weights."""
        self.num_loads += 1
        self.counts = self.shim.pause(str(self.num_loads))
        # Requests on the way to SGLang, and final results on the way here, have to arrive.
        while self.names() - self.counts.keys():
            self._work()
            self.counts = self.shim.pause(str(self.num_loads))

    def resume(self) -> None:
        self.shim.resume_steps()

    def num_sampled(self, key: int) -> list[int]:
        """Return how many tokens each sample of a request has, while SGLang is paused."""
        running = self.running[key]
        lengths = [0] * running.request.sampling.num_draws
        for draw, sample in running.samples.items():
            lengths[draw] = len(sample.token_ids)
        for name, draw in running.names.items():
            if draw is not None:
                lengths[draw] = self.counts[name]
        return running.request.sampling.of_samples(lengths)

    def names(self) -> set[str]:
        """Return the names of all requests that were sent and have not ended."""
        return {name for running in self.running.values() for name in running.names}

    def _work(self) -> None:
        if self.waiting:
            self.tasks.add(self.shim.begin(self._complete(self.waiting)))
            self.waiting = []
        self.shim.work_until(lambda: bool(self.ended), self.tasks)
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            task.result()

    async def _complete(self, batch: list["_Running"]) -> None:
        """Complete requests.

        Every sample is a request of SGLang. It is sent after another one has put the common prompt
        into the cache.
        """
        shared = [running for running in batch if running.request.sampling.num_draws > 1]
        if shared:
            # This only computes the prompt. It is not greedy, because beside greedy requests SGLang
            # sorts the tokens before it draws one.
            async for index, answer in self._answers(
                [(running, {"max_new_tokens": 0, "sampling_seed": 0}, None) for running in shared],
                [None] * len(shared),
            ):
                shared[index].num_cached = answer["meta_info"]["cached_tokens"]

        samples = [
            (running, self._parameters(running.request, seed), _processor(running.request))
            for running in batch
            for seed in running.request.seeds[: running.request.sampling.num_draws]
        ]
        draws = [draw for running in batch for draw in range(running.request.sampling.num_draws)]

        async for index, answer in self._answers(samples, draws):
            running = samples[index][0]
            running.samples[draws[index]] = self._completion(answer, running)
            if len(running.samples) == running.request.sampling.num_draws:
                running.end()
                self.ended.append(running.key)

    async def _answers(
        self, entries: list[tuple["_Running", dict, str | None]], draws: Sequence[int | None]
    ) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Yield index and final result of each request that SGLang gets.

        A stop string or an abort ends a request early. `draws` are the samples that the entries
        draw; None for a prompt alone.
        """
        await self.shim.resumed()
        names = [uuid.uuid4().hex for _ in entries]
        for name, (running, _, _), draw in zip(names, entries, draws, strict=True):
            running.names[name] = draw

        async for index, answer in self.shim.generate(names, entries, str(self.num_loads)):
            running = entries[index][0]
            stop = entries[index][0].request.sampling.stop
            if answer["meta_info"]["finish_reason"] is not None:
                del running.names[names[index]]
                yield index, answer
            elif stop and names[index] not in running.stopped:
                if StopStrings(self.vocabulary.tokenizer, stop).match(
                    answer["output_ids"], LOOK_EVERY
                ):
                    running.stopped.add(names[index])
                    self.shim.abort(names[index])

    def _completion(self, answer: dict[str, Any], running: "_Running") -> Completion:
        """Return one sample, including tokens generated after a stop string."""
        about = answer["meta_info"]
        reason = about["finish_reason"]
        if reason["type"] == ABORTED and not running.aborted and about["id"] not in running.stopped:
            raise EngineError(f"SGLang aborted a request: {reason.get('message')}")

        logprobs = [logprob for logprob, *_ in about.get("output_token_logprobs") or ()]
        tokens = list(answer["output_ids"])[: len(logprobs)]
        ended = "stop" if about["id"] in running.stopped else reason["type"]
        if ended == ABORTED:  # the abort may have come after the last token
            sampling = running.request.sampling
            if tokens and tokens[-1] in self._ends(sampling):
                ended = "stop"
            elif len(tokens) == sampling.max_tokens:
                ended = "length"

        return Completion(tokens, logprobs, ended, about.get("cached_tokens", 0))

    def _ends(self, sampling: Sampling) -> frozenset[int]:
        return self.vocabulary.end_token_ids.union(sampling.stop_token_ids)

    def _parameters(self, request: Request, seed: int) -> dict[str, Any]:
        sampling = request.sampling
        size, truncation = without_padding(sampling.truncation, self.vocabulary.size)

        return {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "sampling_seed": seed,
            "stop_token_ids": sorted(self._ends(sampling)),
            "skip_special_tokens": False,
            "stream_interval": LOOK_EVERY if sampling.stop else RARELY,
            "custom_params": {
                "top_k": truncation.top_k,
                "top_p": truncation.top_p,
                "min_p": truncation.min_p,
                "banned": list(truncation.banned),
                "size": size,
                "temperature": sampling.temperature,
            },
        }


def _processor(request: Request) -> str | None:
    return Truncate.to_str() if request.sampling.truncation.active else None


@dataclass(slots=True, eq=False)
class _Running:
    key: int
    request: Request
    samples: dict[int, Completion] = field(default_factory=dict)
    """Number of a sample -> the sample, for those that have ended."""
    completions: list[Completion] = field(default_factory=list)
    num_cached: int | None = None
    """How many tokens of the prompt were in the cache, if there are several samples."""
    names: dict[str, int | None] = field(default_factory=dict)
    """Name of a running request in SGLang -> number of the sample; None for the prompt alone."""
    stopped: set[str] = field(default_factory=set)
    """Names of the ones that a stop string ended."""
    aborted: bool = False

    def end(self) -> None:
        samples = [sample for _, sample in sorted(self.samples.items())]
        if self.num_cached is not None:
            # An earlier request computed the prompt for all samples, and it saw the cache.
            samples[0].num_cached_tokens = self.num_cached
        self.completions = self.request.sampling.of_samples(samples)
