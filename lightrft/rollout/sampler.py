"""Generate responses to prompts with the strategy's engine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightrft.config.sections import RolloutSection
from lightrft.core.groups import Group
from lightrft.core.samples import Completion, Prompt, Sample
from lightrft.data.loader import share_of
from lightrft.data.media_files import media_of
from lightrft.engine.loop import ABORTED, RequestLoop
from lightrft.engine.requests import Request, Sampling, derived_seed
from lightrft.parallel.collectives import Axis
from lightrft.strategy.shared_session import Finished, SharedSession
from lightrft.strategy.strategy import StrategyBase

GroupPart = tuple[Group, Sequence[int]]
"""A group, and the places of the responses to generate here."""
Pending = tuple[Request, Group, list[int]]
"""A request, the group that it extends, and the places of the extended responses."""
Requests = dict[tuple[int, Sequence[int]], list[Pending]]
"""(group number, places in the group) -> requests for these responses."""
EngineSession = RequestLoop | SharedSession
"""Requests that an engine completes, of this rank alone or of ranks that share the engine."""


class RolloutLoop:
    """Generates the responses of groups, step by step.

    Ranks that share a data replica make the same calls with the same groups. What a response draws
    depends on `seed`, the group's number and the place in the group, but not on the rank.
    """

    def __init__(self, sampler: "Sampler", session: EngineSession, seed: int):
        self.sampler = sampler
        self.session = session
        self.seed = seed
        self._pending: dict[int, Pending] = {}
        """Index of a request -> what it extends."""
        sampler.generating = {}

    @property
    def capacity(self) -> int:
        """Return how many responses the engines of a data replica decode at the same time."""
        n = self.sampler.section.n_samples_per_prompt
        return self.session.prompts_at_once(n) * n

    def add(self, parts: list[GroupPart], prepared: Requests | None = None) -> None:
        """Begin or continue unfinished responses of groups.

        `prepared` has requests for some of them, made by Sampler.prepare() with the same seed.
        Ranks that share an engine call it together.
        """
        prepared = prepared or {}
        pending: list[Pending] = []
        for group, places in parts:
            self.sampler.generating[group.number] = group
            ready = prepared.get((group.number, places))
            pending += ready or self.sampler.pending(group, places, self.seed)

        indices = self.session.add([request for request, _, _ in pending])
        self._pending.update(zip(indices, pending, strict=True))

    def steps(self, most: int | None = None) -> Iterator[Group]:
        """Run at most `most` steps of the engine; yield the groups whose last response ends."""
        for _ in count() if most is None else range(most):
            if not self.session.running:
                return
            yield from self._extend(self.session.step())

    def finish(self) -> Iterator[Group]:
        """Take what other ranks of the replica generated; yield the groups that it completes."""
        yield from self._extend(self.session.of_other_ranks())

    def abort(self) -> None:
        """Stop all responses where they are.

        Only finish() can complete a group after that.
        """
        for _ in self._extend(list(self.session.abort().items())):
            pass

    def running(self) -> set[tuple[int, int]]:
        """Return (group number, place) of each unfinished response that this rank has begun."""
        pending = [self._pending[index] for index in self.session.unfinished]
        return {(group.number, place) for _, group, places in pending for place in places}

    def _extend(self, finished: Finished) -> Iterator[Group]:
        """Append completions to the responses; yield the groups that are now complete."""
        for index, completions in finished:
            _, group, places = self._pending.pop(index)
            for place, completion in zip(places, completions, strict=True):
                self.sampler.extend(group.responses[place], completion)
            if group.complete:
                yield group


class Sampler:
    """Generates the responses of groups.

    Ranks that share a data replica make the same calls with the same groups.
    """

    divides_groups = True
    """Whether several ranks can generate the responses of one group."""

    def __init__(
        self, strategy: StrategyBase, tokenizer: PreTrainedTokenizerBase, section: RolloutSection
    ):
        self.strategy = strategy
        self.tokenizer = tokenizer
        self.section = section
        self.generating: dict[int, Group] = {}
        """Number -> this rank's group, of those that the newest loop has begun."""

    @property
    def exchange(self) -> Axis:
        """Return the axis of all processes, for sums while the engines decode."""
        return self.strategy.mesh.exchange_axis()

    def open(self, seed: int) -> RolloutLoop:
        """Open a loop for groups. All ranks open it together."""
        return RolloutLoop(self, self.strategy.open_generation(sampling_of(self.section)), seed)

    def prepare(self, parts: list[GroupPart], seed: int) -> Requests:
        """Build requests ahead of time, with media in the form that the engine reads.

        Another thread may call it while the engine does nothing else. Raises DataError for data
        that cannot be read.
        """
        prepare = self.strategy.engine.prepare
        return {
            (group.number, places): [
                (prepare(request), *rest) for request, *rest in self.pending(group, places, seed)
            ]
            for group, places in parts
        }

    def answer(self, prompts: Sequence[Prompt], *, seed: int) -> list[Group]:
        """Answer prompts for an evaluation: greedily, and with --eval_n_samples sampled responses.

        `prompts` are the prompts of all ranks; the result has this rank's share.
        """
        data = self.strategy.mesh.data
        groups = [
            Group.begin(number, number, prompts[number], self.section.eval_n_samples, others=1)
            for number in share_of(data.rank, data.size, len(prompts))
        ]

        # Everything below reads self.section, and evaluation differs only in the temperature.
        training = self.section
        if self.section.eval_temperature is not None:
            self.section = replace(training, temperature=self.section.eval_temperature)
        try:
            loop = self.open(seed)
            loop.add([(group, group.places) for group in groups])
            for _ in chain(loop.steps(), loop.finish()):
                pass
        finally:
            self.section = training

        return groups

    def pending(self, group: Group, places: Sequence[int], seed: int) -> Iterator[Pending]:
        """Yield the requests for these responses of a group.

        New responses share one request, so the prompt is computed once. A response that continues
        has a request of its own, and so has the greedy one. With --rollout_schedule longest_first
        every response has a request of its own, because the loop must see each of them end.
        """
        unfinished = [place for place in places if group.responses[place].finish_reason is None]
        sampled = [place for place in unfinished if place < len(group.samples)]

        together: list[int] = []
        if self.section.rollout_schedule != "longest_first":
            together = [place for place in sampled if not group.samples[place].token_ids]
        alone = [[place] for place in sampled if place not in together]

        for chosen in [together, *alone] if together else alone:
            sampling = sampling_of(self.section, n=len(chosen))
            seeds = tuple(derived_seed(seed, group.number, place) for place in chosen)
            request = self.request(group.samples[chosen[0]], sampling, seeds)
            yield replace(request, group=group.number), group, chosen

        for place in unfinished[len(sampled) :]:
            yield self.request(group.others[0], greedy_sampling(self.section), ()), group, [place]

    def request(
        self,
        sample: Sample,
        sampling: Sampling,
        seeds: tuple[int, ...],
        *,
        longest: int | None = None,
    ) -> Request:
        """Build the request that continues a response by at most `longest` tokens."""
        rest = self.section.generate_max_len - len(sample.token_ids)
        sampling = replace(sampling, max_tokens=min(rest, longest or rest))
        # These two options concern the first tokens of a response, and some of them exist already.
        if sample.token_ids:
            left = max(sampling.min_tokens - len(sample.token_ids), 0)
            sampling = replace(sampling, first_token_temperature=None, min_tokens=left)

        tokens = [*sample.prompt.token_ids, *sample.token_ids]
        return Request(tokens, media_of(sample.prompt), sampling, seeds)

    def extend(self, sample: Sample, completion: Completion) -> None:
        """Append a completion to a response, and end the response unless it was aborted."""
        sample.token_ids += completion.token_ids
        sample.logprobs += completion.logprobs
        sample.weight_versions += completion.weight_versions
        if completion.drafts.count:
            sample.drafts = sample.drafts.plus(completion.drafts)
        if completion.experts is not None:
            # Tokens that had a record keep the experts that their log-probs come from.
            before = completion.experts[:0] if sample.experts is None else sample.experts
            sample.experts = np.concatenate([before, completion.experts[len(before) :]])

        if completion.finish_reason != ABORTED:
            sample.finish_reason = completion.finish_reason
            # An episode's tokens include observations; only the new turn is the model's answer.
            turn = sample.token_ids if sample.episode is None else completion.token_ids
            sample.text = self.tokenizer.decode(turn, skip_special_tokens=True)


def sampling_of(section: RolloutSection, **own: Any) -> Sampling:
    """Build the sampling parameters from the flags; `own` values override them."""
    from_flags = {
        "n": section.n_samples_per_prompt,
        "max_tokens": section.generate_max_len,
        "temperature": section.temperature,
        "top_p": section.top_p,
        "top_k": section.top_k,
        "min_p": section.min_p,
        "stop": tuple(section.stop),
        "stop_token_ids": tuple(section.stop_token_ids),
        "first_token_temperature": section.first_token_temperature,
        "min_tokens": section.min_tokens,
        "banned_token_ids": tuple(section.banned_token_ids),
    }
    return Sampling(**from_flags | own)


def greedy_sampling(section: RolloutSection, **own: Any) -> Sampling:
    """Build parameters for one greedy response, with the flags' limits."""
    return sampling_of(
        section, **{"n": 1, "temperature": 0.0, "first_token_temperature": None} | own
    )
