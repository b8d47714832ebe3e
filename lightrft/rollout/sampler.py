"""Generate responses to prompts with the strategy's engine."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain, count
from multiprocessing.connection import Connection

from transformers import PreTrainedTokenizerBase

from lightrft.agents.episodes import Episodes, EpisodeState
from lightrft.config.sections import RolloutSection
from lightrft.data.loader import share_of
from lightrft.data.media import media_of
from lightrft.engine.loop import ABORTED
from lightrft.engine.requests import Request, Sampling, derived_seed
from lightrft.engine.sampling_parameters import greedy_sampling, sampling_of
from lightrft.parallel.collectives import Axis
from lightrft.rollout.groups import GROWING, Group
from lightrft.strategy.engine_host import Finished, Generation
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.types import Completion, Prompt, Sample

Part = tuple[Group, range]
"""A group, and the places of its responses that are generated here."""
Pending = tuple[Request, Group, list[int]]
"""A request, the group whose responses it extends, and their places."""
Requests = dict[tuple[int, range], list[Pending]]
"""(number of a group, places in it) -> requests for these responses."""
TOOLS = 0.02
"""Seconds for which an engine without requests waits for the programs of episodes, before the ranks
exchange their counts."""


class Growth:
    """Groups whose responses are generated.

    Ranks that share a data replica make the same calls with the same groups.

    The draws of a response depend on `seed`, the number of its group and its position in it, not on
    the rank.
    """

    def __init__(self, sampler: "Sampler", generation: Generation, seed: int):
        self.sampler = sampler
        self.generation = generation
        self.seed = seed
        n = sampler.section.n_samples_per_prompt
        self.at_once = generation.prompts_at_once(n) * n
        """Number of responses that a data replica's engines decode at the same time."""
        self._pending: dict[int, Pending] = {}
        self._plays: dict[int, EpisodeState] = {}
        """Index of a request -> its episode."""
        self._groups: dict[int, Group] = {}
        """Number of a group with episodes -> the group."""

    def add(self, parts: list[Part], prepared: Requests | None = None) -> None:
        """Begin or continue unfinished responses of groups; `prepared` has requests for some, from
        Sampler.prepare() with the same seed. Ranks that share an engine call it together.
        """
        if self.sampler.episodes is not None:
            self._groups |= {group.number: group for group, _ in parts}
            model_parallel = self.generation.model_parallel
            samples = [
                (group.responses[place], group.number, place)
                for group, places in parts
                for place in places
            ]
            for sample, *seed_parts in samples[model_parallel.rank :: model_parallel.size]:
                self.sampler.episodes.begin(sample, *seed_parts)
            return

        requests = prepared or {}
        pending = []
        for group, places in parts:
            pending += requests.get((group.number, places)) or self.sampler.pending(
                group, places, self.seed
            )

        self._pending.update(
            zip(self.generation.add([request for request, _, _ in pending]), pending, strict=True)
        )

    def attach(self, group: Group, socket: Connection) -> None:
        """Begin a group of one episode whose program sends its requests over a socket."""
        self._groups[group.number] = group
        self.sampler.episodes.attach(group.samples[0], socket, group.number, 0)

    def forget(self, group: Group) -> None:
        """Forget a complete group."""
        del self._groups[group.number]

    def steps(self, most: int | None = None) -> Iterator[Group]:
        """Let the engine do at most `most` steps; yield each group as soon as its last response has
        ended.
        """
        for _ in count() if most is None else range(most):
            if self.sampler.episodes is not None:
                yield from self._play(self.sampler.episodes)
            if self.generation.running:
                yield from self._extend(self.generation.step())
            elif not self.sampler.episodes or not self.generation.on_any_rank(
                bool(self.sampler.episodes.running)
            ):
                return

    def _play(self, episodes: Episodes) -> Iterator[Group]:
        """Begin the turns for which programs wait, and yield the groups whose last episode has
        ended.
        """
        if self.generation.running:
            ready = episodes.poll(0)
        else:
            with self.sampler.strategy.trace.phase("tools", idle=True):
                ready = episodes.poll(TOOLS)

        turns = [
            (play, self.sampler.next_turn(play, self._groups[play.sample.group], self.seed))
            for play in ready
        ]
        problems = [self.sampler.strategy.engine.problem(request) for _, request in turns]

        for (play, _), problem in zip(turns, problems, strict=True):
            if problem:
                episodes.refuse(play, problem)

        ready = [play for (play, _), problem in zip(turns, problems, strict=True) if not problem]
        requests = [
            request for (_, request), problem in zip(turns, problems, strict=True) if not problem
        ]
        for index, request, play in zip(
            self.generation.add(requests, own=True), requests, ready, strict=True
        ):
            self._plays[index] = play
            self._pending[index] = request, self._groups[play.sample.group], [play.seed_parts[1]]

        for number in {sample.group for sample in episodes.take_ended()}:
            if self._groups[number].complete:
                yield self._groups[number]

    def finish(self) -> Iterator[Group]:
        """Take what other ranks of the data replica have generated; yield the groups that are
        complete with it.
        """
        if self.sampler.episodes is None:
            yield from self._extend(self.generation.of_other_ranks())
        elif self.generation.model_parallel.size > 1:
            yield from self._exchange()

    def _exchange(self) -> Iterator[Group]:
        """Exchange samples of episodes with the other ranks of the data replica; yield the groups
        that are complete with them.
        """
        incomplete = [group for group in self._groups.values() if not group.complete]
        own = {
            (group.number, place): sample
            for group in self._groups.values()
            for place, sample in enumerate(group.responses)
            if sample.finish_reason != GROWING
        }

        for others in self.generation.model_parallel.gather(own):
            for (number, place), sample in others.items():
                sample_of_rank = self._groups[number].responses[place]
                for each in fields(Sample):
                    setattr(sample_of_rank, each.name, getattr(sample, each.name))

        yield from (group for group in incomplete if group.complete)

    def abort(self) -> None:
        """End all responses where they are.

        A group may become complete only by what finish() takes.
        """
        for _ in self._extend(self.generation.abort()):
            pass
        if self.sampler.episodes is not None:
            self.sampler.episodes.abort()

    def running(self) -> set[tuple[int, int]]:
        """Return (number of its group, place in it) of each response that this rank has begun whose
        request, or episode, runs.
        """
        if self.sampler.episodes is not None:
            return {play.seed_parts for play in self.sampler.episodes.running}
        pending = (self._pending[index] for index in self.generation.unfinished)
        return {(group.number, place) for _, group, places in pending for place in places}

    def _extend(self, finished: Finished) -> Iterator[Group]:
        for index, completions in finished:
            _, group, places = self._pending.pop(index)
            if self.sampler.episodes is not None:
                self._turn(self._plays.pop(index), completions[0])
                continue
            for place, completion in zip(places, completions, strict=True):
                self.sampler.extend(group.responses[place], completion)
            if group.complete:
                yield group

    def _turn(self, play: EpisodeState, completion: Completion) -> None:
        """Give a turn that the engine has sampled to its episode."""
        sample = play.conversation
        self.sampler.extend(sample, completion)
        sample.finish_reason = GROWING
        if completion.finish_reason != ABORTED:
            self.sampler.episodes.generated(play, completion, sample.text)


class Sampler:
    """Generates the responses of groups.

    Ranks that share a data replica call it with the same groups.
    """

    def __init__(
        self,
        strategy: StrategyBase,
        tokenizer: PreTrainedTokenizerBase,
        section: RolloutSection,
        *,
        episodes: Episodes | None = None,
    ):
        """Set up the sampler. With `episodes` a response has several turns."""
        self.strategy = strategy
        self.tokenizer = tokenizer
        self.section = section
        self.episodes = episodes

    @property
    def exchange(self) -> Axis:
        """Return all processes, for sums that are exchanged while the engines decode."""
        return self.strategy.mesh.exchange_axis()

    def open(self, seed: int) -> Growth:
        """Return the growth of groups, which all ranks open together."""
        return Growth(self, self.strategy.open_generation(sampling_of(self.section)), seed)

    def prepare(self, parts: list[Part], seed: int) -> Requests:
        """Build the requests for responses that will be added, with media as the engine reads them;
        none for episodes.

        Another thread may call it while the engine does nothing else. Data that cannot be read
        raise DataError.
        """
        if self.episodes is not None:
            return {}
        prepare = self.strategy.engine.prepare
        return {
            (group.number, places): [
                (prepare(request), *rest) for request, *rest in self.pending(group, places, seed)
            ]
            for group, places in parts
        }

    def answer(self, prompts: Sequence[Prompt], *, seed: int) -> list[Group]:
        """Return the greedy response to each of this rank's prompts and --eval_n_samples others,
        from all ranks' prompts.
        """
        data = self.strategy.mesh.data
        count = self.section.eval_n_samples
        local_rows = share_of(data.rank, data.size, len(prompts))
        groups = [
            Group.begin(number, number, prompts[number], count=count, greedy=True)
            for number in local_rows
        ]
        training = self.section
        self.section = self._evaluating()

        try:
            growth = self.open(seed)
            growth.add([(group, group.places) for group in groups])
            for _ in chain(growth.steps(), growth.finish()):
                pass
        finally:
            self.section = training

        return groups

    def _evaluating(self) -> RolloutSection:
        """Return the section with evaluation's own temperature."""
        warm = self.section.eval_temperature
        return self.section if warm is None else replace(self.section, temperature=warm)

    def pending(self, group: Group, places: Sequence[int], seed: int) -> Iterator[Pending]:
        """Yield the requests of these responses of a group: one for all new samples, which share
        its prefill, and one for each continued sample, and for the greedy response. If ranks share
        groups, each sample has its own, so that its end is seen.
        """
        growing = [place for place in places if group.responses[place].finish_reason == GROWING]
        sampled = [place for place in growing if place < len(group.samples)]

        new = [place for place in sampled if not group.samples[place].token_ids]
        together = [] if self.section.rollout_schedule == "longest_first" else new
        for chosen in [together] * bool(together) + [
            [place] for place in sampled if place not in together
        ]:
            seeds = tuple(derived_seed(seed, group.number, place) for place in chosen)
            request = self._request(
                group.samples[chosen[0]], sampling_of(self.section, n=len(chosen)), seeds
            )
            yield replace(request, group=group.number), group, chosen

        for place in growing[len(sampled) :]:
            yield self._request(group.greedy, greedy_sampling(self.section), ()), group, [place]

    def next_turn(self, play: EpisodeState, group: Group, seed: int) -> Request:
        """Build the request for the next turn of an episode."""
        sample = play.conversation
        greedy = play.sample is group.greedy
        sampling = (
            greedy_sampling(self.section)
            if greedy
            else replace(sampling_of(self.section, n=1), **play.sampling)
        )
        seeds = (
            ()
            if greedy
            else (derived_seed(seed, *play.seed_parts, *([len(play.turns)] if play.turns else [])),)
        )

        limits = [
            limit
            for limit in (self.episodes.section.turn_max_len, play.max_tokens)
            if limit is not None
        ]
        request = self._request(sample, sampling, seeds, longest=min(limits, default=None))
        return request if greedy else replace(request, group=group.number)

    def _request(
        self,
        sample: Sample,
        sampling: Sampling,
        seeds: tuple[int, ...],
        *,
        longest: int | None = None,
    ) -> Request:
        """Build the request that continues a response after its tokens, by at most `longest` of
        them.
        """
        longest_rest = self.section.generate_max_len - len(sample.token_ids)
        sampling = replace(sampling, max_tokens=min(longest_rest, longest or longest_rest))
        if sample.token_ids:
            left = max(sampling.min_tokens - len(sample.token_ids), 0)
            sampling = replace(sampling, first_token_temperature=None, min_tokens=left)
        return Request(
            [*sample.prompt.token_ids, *sample.token_ids], media_of(sample.prompt), sampling, seeds
        )

    def extend(self, sample: Sample, completion: Completion) -> None:
        """Append a completion to a response, which ends unless the completion was aborted."""
        sample.token_ids += completion.token_ids
        sample.logprobs += completion.logprobs
        sample.weight_versions += completion.weight_versions
        sample.drafts = sample.drafts.plus(completion.drafts)
        if completion.finish_reason != ABORTED:
            sample.finish_reason = completion.finish_reason
            turn = sample.token_ids if sample.episode is None else completion.token_ids
            sample.text = self.tokenizer.decode(turn, skip_special_tokens=True)
