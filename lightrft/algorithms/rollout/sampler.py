"""Generate responses with the options of a run: media, greedy responses, requests built ahead."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.config.sections import RolloutSection
from lightrft.core.engine import Request
from lightrft.core.groups import Group
from lightrft.core.sampler import GroupSlots, PendingRequest, RolloutLoop, Sampler
from lightrft.core.samples import Prompt, Sample
from lightrft.data.loader import share_of
from lightrft.data.media_files import media_of
from lightrft.engine.requests import Sampling
from lightrft.models.parallel.collectives import Axis
from lightrft.strategy.strategy import StrategyBase


class RunSampler(Sampler):
    """Generates responses as the flags of a run say."""

    divides_groups = True
    """Whether several ranks can generate the responses of one group."""

    def __init__(self, strategy: StrategyBase, tokenizer: Tokenizer, section: RolloutSection):
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        super().__init__(strategy, decode, sampling_of(section))
        self.section = section

    @property
    def exchange(self) -> Axis:
        """Return the axis of all processes, for sums while the engines decode."""
        return self.strategy.mesh.gloo_axis("exchange")

    def capacity(self, loop: RolloutLoop) -> int:
        """Return how many responses the engines of a data replica decode at the same time."""
        n = self.section.n_samples_per_prompt
        return loop.session.prompts_at_once(n) * n

    def prepare(self, groups: list[GroupSlots], seed: int) -> list[PendingRequest] | None:
        """Build requests ahead of time, with media in the form that the engine reads.

        A loop with this seed begins them. None: what to ask is not known before the loop begins.
        Another thread may call it while the engine does nothing else. Raises DataError for data
        that cannot be read.
        """
        prepare = self.strategy.engine.prepare
        return [
            one._replace(request=prepare(one.request))
            for group, slots in groups
            for one in self.requests(group, slots, seed)
        ]

    def answer(self, prompts: Sequence[Prompt], *, seed: int) -> list[Group]:
        """Answer prompts for an evaluation: greedily, and with --eval_n_samples sampled responses.

        `prompts` are the prompts of all ranks; the result has this rank's share.
        """
        data = self.strategy.mesh.data
        groups = [
            Group.begin(number, number, prompts[number], self.section.eval_n_samples, others=1)
            for number in share_of(data.rank, data.size, len(prompts))
        ]

        # Evaluation differs only in the temperature.
        training = self.sampling
        if self.section.eval_temperature is not None:
            self.sampling = replace(training, temperature=self.section.eval_temperature)
        try:
            loop = self.open(seed)
            loop.add([(group, group.slots) for group in groups])
            for _ in chain(loop.steps(), loop.finish()):
                pass
        finally:
            self.sampling = training

        return groups

    def requests(self, group: Group, slots: Sequence[int], seed: int) -> Iterator[PendingRequest]:
        """Yield the requests for these responses of a group; the greedy one is alone in a request.

        With --rollout_schedule longest_first every response has a request of its own, because the
        loop must see each of them end.
        """
        sampled = [slot for slot in slots if slot < len(group.samples)]
        separate = self.section.rollout_schedule == "longest_first"
        for chosen in [[slot] for slot in sampled] if separate else [sampled]:
            yield from super().requests(group, chosen, seed)

        for slot in slots[len(sampled) :]:
            sample = group.responses[slot]
            if sample.finish_reason is None:
                request = self.request(sample, greedy_sampling(self.section), ())
                yield PendingRequest(replace(request, group=None), group, [slot])

    def request(self, sample: Sample, sampling: Sampling, seeds: tuple[int, ...]) -> Request:
        request = super().request(sample, sampling, seeds)
        return replace(request, multi_modal=media_of(sample.prompt))


def sampling_of(section: RolloutSection, **overrides: Any) -> Sampling:
    """Build the sampling parameters from the flags; `overrides` win."""
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
    return Sampling(**from_flags | overrides)


def greedy_sampling(section: RolloutSection, **overrides: Any) -> Sampling:
    """Build parameters for one greedy response, with the flags' limits."""
    return sampling_of(
        section, **{"n": 1, "temperature": 0.0, "first_token_temperature": None} | overrides
    )
