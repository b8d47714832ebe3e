"""Separate temperature for the first token of a response, in any engine: FIRE (Chen et al., arXiv 2410.21236).

It takes two calls: one generates the first tokens, the other their continuations, for which the prompts are in the cache.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from lightrft.engine.requests import Request, derived_seed
from lightrft.types import Completion

CompletionIterator = Iterator[tuple[int, list[Completion]]]
"""Iterator over (index, completions) of each request as it ends."""
Generate = Callable[[list[Request]], CompletionIterator]
"""Function that completes requests, which must all have their sampling and seeds."""


def first_token_apart(generate: Generate, requests: list[Request]) -> CompletionIterator:
    """Yield what generate(requests) yields, with support for first_token_temperature."""
    hot = [index for index, request in enumerate(requests) if request.sampling.first_token_temperature is not None]
    if not hot:
        yield from generate(requests)
        return
    samples = {hot[place]: found for place, found in generate([_first_token(requests[index]) for index in hot])}
    open_samples = _open_samples(requests, samples)
    missing = {index: sum(sample[0] == index for sample in open_samples) for index in hot}
    for index in hot:
        if not missing[index]:
            yield index, samples[index]
    whole = [index for index in range(len(requests)) if index not in samples]
    rest = [_rest(requests[index], requests[index].seeds[sample], samples[index][sample]) for index, sample in open_samples]
    for place, found in generate(rest + [requests[index] for index in whole]):
        if place >= len(open_samples):
            yield whole[place - len(open_samples)], found
            continue
        index, sample = open_samples[place]
        samples[index][sample] = _concatenated(samples[index][sample], found[0])
        missing[index] -= 1
        if not missing[index]:
            yield index, samples[index]


def _open_samples(requests: list[Request], samples: dict[int, list[Completion]]) -> list[tuple[int, int]]:
    """Return (request, sample) indices of the samples that continue after their first token."""
    return [
        (index, sample)
        for index, found in samples.items()
        for sample, completion in enumerate(found)
        if completion.finish_reason == "length" and requests[index].sampling.max_tokens > 1
    ]


def _first_token(request: Request) -> Request:
    sampling = request.sampling
    first = replace(sampling, max_tokens=1, temperature=sampling.first_token_temperature, first_token_temperature=None)
    return replace(request, sampling=first)


def _rest(request: Request, seed: int, begun: Completion) -> Request:
    """Build the request that continues a sample. A derived seed makes its noise independent of the first token's, also in an
    engine that counts positions from the end of the prompt.
    """
    sampling = request.sampling
    rest = replace(sampling, n=1, max_tokens=sampling.max_tokens - 1, first_token_temperature=None)
    return replace(request.followed_by(begun.token_ids), sampling=rest, seeds=(derived_seed(seed, len(begun.token_ids)),))


def _concatenated(first: Completion, rest: Completion) -> Completion:
    return replace(rest, token_ids=first.token_ids + rest.token_ids, logprobs=first.logprobs + rest.logprobs,
                   num_cached_tokens=first.num_cached_tokens)
