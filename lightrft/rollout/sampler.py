"""Generate responses to prompts with the strategy's engine."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count

from transformers import PreTrainedTokenizerBase

from lightrft.config.sections import RolloutSection
from lightrft.data.images import opened
from lightrft.data.loader import share_of
from lightrft.engine.loop import ABORTED
from lightrft.engine.requests import Request, Sampling, derived_seed
from lightrft.engine.sampling_parameters import greedy_sampling, sampling_of
from lightrft.parallel.collectives import Axis
from lightrft.rollout.groups import GROWING, Group
from lightrft.rollout.schedule import room_for
from lightrft.strategy.engine_host import Finished, Generation
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.types import Completion, Prompt, Sample

Pending = tuple[Request, list[Sample], Group]
"""A request, the responses that it extends, and their group."""


class Growth:
    """Groups whose responses are generated. Ranks that share a data replica make the same calls with the same groups.

    The draws of a response depend on `seed`, the number of its group and its position in it, not on the rank.
    """

    def __init__(self, sampler: "Sampler", generation: Generation, seed: int):
        self.sampler, self.generation, self.seed = sampler, generation, seed
        n = sampler.section.n_samples_per_prompt
        self.room = room_for(generation.prompts_at_once(n), n)
        """Number of incomplete groups that keep a data replica's engines busy."""
        self._pending: list[Pending] = []

    def add(self, groups: list[Group]) -> None:
        """Begin or continue the unfinished responses of groups. Ranks that share an engine call it together."""
        pending = [each for group in groups for each in self.sampler.pending(group, self.seed)]
        self._pending += pending
        self.generation.add([request for request, _, _ in pending])

    def steps(self, most: int | None = None) -> Iterator[Group]:
        """Let the engine do at most `most` steps; yield each group as soon as its last response has ended."""
        for _ in count() if most is None else range(most):
            if not self.generation.running:
                return
            yield from self._extended(self.generation.step())

    def finish(self) -> Iterator[Group]:
        """Take what other ranks of the data replica have generated; yield the groups that are complete with it."""
        yield from self._extended(self.generation.of_siblings())

    def abort(self) -> None:
        """End all responses where they are. A group may become complete only by what finish() takes."""
        for _ in self._extended(self.generation.abort()):
            pass

    def running(self) -> Counter[int]:
        """Return the number of requests of each group, by its number, that this rank has submitted and that run."""
        return Counter(self._pending[index][2].number for index in self.generation.unfinished)

    def _extended(self, finished: Finished) -> Iterator[Group]:
        for index, completions in finished:
            _, samples, group = self._pending[index]
            for sample, completion in zip(samples, completions, strict=True):
                self.sampler.extend(sample, completion)
            if group.complete:
                yield group


class Sampler:
    """Generates the responses of groups. Ranks that share a data replica call it with the same groups."""

    def __init__(self, strategy: StrategyBase, tokenizer: PreTrainedTokenizerBase, section: RolloutSection):
        self.strategy = strategy
        self.tokenizer = tokenizer
        self.section = section

    @property
    def exchange(self) -> Axis:
        """Return all processes, for sums that are exchanged while the engines decode."""
        return self.strategy.mesh.exchange_axis()

    def open(self, seed: int) -> Growth:
        """Return the growth of groups, which all ranks open together."""
        return Growth(self, self.strategy.open_generation(sampling_of(self.section)), seed)

    def answer(self, prompts: Sequence[Prompt], *, seed: int) -> list[Group]:
        """Return the greedy response to each of this rank's prompts and --eval_n_samples others, from all ranks' prompts."""
        data, count = self.strategy.mesh.data, self.section.eval_n_samples
        local_rows = share_of(data.rank, data.size, len(prompts))
        groups = [Group.begin(number, number, prompts[number], count=count, greedy=True) for number in local_rows]
        training, self.section = self.section, self._evaluating()
        try:
            growth = self.open(seed)
            growth.add(groups)
            for _ in chain(growth.steps(), growth.finish()):
                pass
        finally:
            self.section = training
        return groups

    def _evaluating(self) -> RolloutSection:
        """Return the section with evaluation's own temperature."""
        warm = self.section.eval_temperature
        return self.section if warm is None else replace(self.section, temperature=warm)

    def pending(self, group: Group, seed: int) -> Iterator[Pending]:
        """Yield the requests of a group: one for all new samples, which share its prefill, and one for each continued sample."""
        growing = [place for place, sample in enumerate(group.samples) if sample.finish_reason == GROWING]
        first = not any(sample.token_ids for sample in group.samples)
        for places in [growing] if growing and first else [[place] for place in growing]:
            seeds = tuple(derived_seed(seed, group.number, place) for place in places)
            samples = [group.samples[place] for place in places]
            request = self._request(samples[0], sampling_of(self.section, n=len(samples)), seeds)
            yield replace(request, group=group.number), samples, group
        if group.greedy is not None and group.greedy.finish_reason == GROWING:
            yield self._request(group.greedy, greedy_sampling(self.section), ()), [group.greedy], group

    def _request(self, sample: Sample, sampling: Sampling, seeds: tuple[int, ...]) -> Request:
        """Build the request that continues a response after its tokens."""
        sampling = replace(sampling, max_tokens=self.section.generate_max_len - len(sample.token_ids))
        if sample.token_ids:
            sampling = replace(sampling, first_token_temperature=None)
        return Request([*sample.prompt.token_ids, *sample.token_ids], opened(sample.prompt.multi_modal), sampling, seeds)

    def extend(self, sample: Sample, completion: Completion) -> None:
        """Append a completion to a response, which ends unless the completion was aborted."""
        if not sample.token_ids:
            sample.weight_version = completion.weight_version
        sample.token_ids += completion.token_ids
        sample.logprobs += completion.logprobs
        sample.drafts = sample.drafts.plus(completion.drafts)
        if completion.finish_reason != ABORTED:
            sample.finish_reason = completion.finish_reason
            sample.text = self.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
