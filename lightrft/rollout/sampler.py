"""Generate responses to prompts with the strategy's engine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from lightrft.config.sections import RolloutSection
from lightrft.data.images import opened
from lightrft.data.loader import share_of
from lightrft.engine.requests import Request, Sampling, derived_seed
from lightrft.engine.sampling_parameters import greedy_sampling, sampling_of
from lightrft.rollout.groups import GROWING, Group
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.types import Completion, Prompt, Sample

Pending = tuple[Request, list[Sample], Group]
"""A request, the responses that it extends, and their group."""


class Sampler:
    """Generates the responses of groups. Ranks that share a data replica call it with the same groups."""

    def __init__(self, strategy: StrategyBase, tokenizer: PreTrainedTokenizerBase, section: RolloutSection):
        self.strategy = strategy
        self.tokenizer = tokenizer
        self.section = section

    def grow(self, groups: list[Group], *, seed: int, limit: int | None = None) -> Iterator[Group]:
        """Extend the unfinished responses of this rank's groups: to their end, or by at most `limit` tokens.

        Returns an iterator, which must be exhausted, over the groups: each as soon as its last response has ended, while others
        continue.
        The draws of a response depend on `seed`, the number of its group and its position in it, not on the rank.
        """
        pending = [each for group in groups for each in self._pending(group, seed, limit)]
        requests = [request for request, _, _ in pending]
        finished = self.strategy.gather_and_generate(sampling_of(self.section), requests=requests, as_completed=True)
        return self._grown(pending, finished)

    def _grown(self, pending: list[Pending], finished: Iterator[tuple[int, list[Completion]]]) -> Iterator[Group]:
        for index, completions in finished:
            _, samples, group = pending[index]
            for sample, completion in zip(samples, completions, strict=True):
                self._extend(sample, completion)
            if group.complete:
                yield group

    def answer(self, prompts: Sequence[Prompt], *, seed: int) -> list[Group]:
        """Return the greedy response to each of this rank's prompts and --eval_n_samples others, from all ranks' prompts."""
        data, count = self.strategy.mesh.data, self.section.eval_n_samples
        local_rows = share_of(data.rank, data.size, len(prompts))
        groups = [Group.begin(number, number, prompts[number], count=count, greedy=True) for number in local_rows]
        training, self.section = self.section, self._evaluating()
        try:
            list(self.grow(groups, seed=seed))
        finally:
            self.section = training
        return groups

    def _evaluating(self) -> RolloutSection:
        """Return the section with evaluation's own temperature."""
        warm = self.section.eval_temperature
        return self.section if warm is None else replace(self.section, temperature=warm)

    def _pending(self, group: Group, seed: int, limit: int | None) -> Iterator[Pending]:
        """Yield the requests of a group: one for all new samples, which share its prefill, and one for each continued sample."""
        growing = [place for place, sample in enumerate(group.samples) if sample.finish_reason == GROWING]
        first = not any(sample.token_ids for sample in group.samples)
        for places in [growing] if growing and first else [[place] for place in growing]:
            seeds = tuple(derived_seed(seed, group.number, place) for place in places)
            samples = [group.samples[place] for place in places]
            request = self._request(samples[0], sampling_of(self.section, n=len(samples)), seeds, limit)
            yield replace(request, group=group.number), samples, group
        if group.greedy is not None and group.greedy.finish_reason == GROWING:
            yield self._request(group.greedy, greedy_sampling(self.section), (), limit), [group.greedy], group

    def _request(self, sample: Sample, sampling: Sampling, seeds: tuple[int, ...], limit: int | None) -> Request:
        """Build the request that continues a response after its tokens."""
        left = self.section.generate_max_len - len(sample.token_ids)
        sampling = replace(sampling, max_tokens=min(limit or left, left))
        if sample.token_ids:
            sampling = replace(sampling, first_token_temperature=None)
        return Request([*sample.prompt.token_ids, *sample.token_ids], opened(sample.prompt.multi_modal), sampling, seeds)

    def _extend(self, sample: Sample, completion: Completion) -> None:
        if not sample.token_ids:
            sample.weight_version = completion.weight_version
        sample.token_ids += completion.token_ids
        sample.logprobs += completion.logprobs
        sample.drafts = sample.drafts.plus(completion.drafts)
        if completion.finish_reason != "length" or len(sample.token_ids) >= self.section.generate_max_len:
            sample.finish_reason = completion.finish_reason
            sample.text = self.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
