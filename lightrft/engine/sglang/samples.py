"""Conversion of requests to SGLang's requests, and of its results to completions."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightrft.engine.base import EngineError
from lightrft.engine.model_info import Vocabulary
from lightrft.engine.requests import Request
from lightrft.engine.sglang.sampling import Truncate
from lightrft.engine.sglang.shim import SGLangShim
from lightrft.engine.stops import StopStrings
from lightrft.types import Completion

LOOK_EVERY = 8
"""Number of tokens between checks for stop strings, which abort a request; RARELY if there are none."""
RARELY = 2**30


@dataclass(frozen=True, slots=True)
class Samples:
    """Generation of the samples of one call of the engine."""

    shim: SGLangShim
    vocabulary: Vocabulary
    version: int
    """Version of the weights."""

    def of(self, requests: list[Request]) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (index, completions) of each request.

        Every sample is a separate SGLang request, sent after a request that puts the common prompt into the cache.
        """
        shared = [index for index, request in enumerate(requests) if request.sampling.num_draws > 1]
        num_cached = dict(self._prefilled(requests, shared))
        samples = [_Sample(index, request, seed)
                   for index, request in enumerate(requests) for seed in request.seeds[: request.sampling.num_draws]]
        missing = [request.sampling.num_draws for request in requests]
        for place, completion in self._sampled(samples):
            index = samples[place].index
            samples[place].completion = completion
            missing[index] -= 1
            if not missing[index]:
                found = [sample.completion for sample in samples if sample.index == index]
                found[0].num_cached_tokens = num_cached.get(index, found[0].num_cached_tokens)
                yield index, found if len(found) > 1 else [copy.deepcopy(found[0]) for _ in range(requests[index].sampling.n)]

    def _prefilled(self, requests: list[Request], shared: list[int]) -> Iterator[tuple[int, int]]:
        """Prefill the requests `shared`; yield the index and the number of cached tokens of each."""
        if shared:
            parameters = [{"max_new_tokens": 0, "temperature": 0, "sampling_seed": 0}] * len(shared)
            for answer in self.shim.generate([requests[index] for index in shared], parameters, [None] * len(shared)):
                yield shared[answer["index"]], answer["meta_info"]["cached_tokens"]

    def _sampled(self, samples: list["_Sample"]) -> Iterator[tuple[int, Completion]]:
        """Yield position and completion of each sample as it ends, including tokens generated after a stop string."""
        parameters = [self._parameters(sample) for sample in samples]
        processors = [Truncate.to_str() if sample.request.sampling.truncation.active else None for sample in samples]
        for answer in self.shim.generate([sample.request for sample in samples], parameters, processors):
            place, reason = answer["index"], answer["meta_info"]["finish_reason"]
            if reason is not None:
                yield place, self._completion(answer, samples[place])
            elif (stop := samples[place].request.sampling.stop) and not samples[place].stopped:
                samples[place].stopped = StopStrings(self.vocabulary.tokenizer, stop).reached(answer["output_ids"], LOOK_EVERY)
                if samples[place].stopped:
                    self.shim.abort(answer)

    def _parameters(self, sample: "_Sample") -> dict[str, Any]:
        sampling = sample.request.sampling
        return {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "sampling_seed": sample.seed,
            "stop_token_ids": sorted(self.vocabulary.end_token_ids | set(sampling.stop_token_ids)),
            "skip_special_tokens": False,
            "stream_interval": LOOK_EVERY if sampling.stop else RARELY,
            "custom_params": {"top_k": sampling.top_k, "top_p": sampling.top_p, "banned": list(sampling.banned_token_ids),
                              "temperature": sampling.temperature},
        }

    def _completion(self, answer: dict[str, Any], sample: "_Sample") -> Completion:
        about = answer["meta_info"]
        reason = about["finish_reason"]
        if reason["type"] == "abort" and not sample.stopped:
            raise EngineError(f"SGLang aborted a request: {reason.get('message')}")
        logprobs = [logprob for logprob, *_ in about["output_token_logprobs"]]
        return Completion(list(answer["output_ids"]), logprobs, reason["type"], self.version, about["cached_tokens"])


@dataclass(slots=True)
class _Sample:
    index: int
    """Index of its request."""
    request: Request
    seed: int
    stopped: bool = False
    """True if a stop string was found and the request aborted."""
    completion: Completion | None = None
