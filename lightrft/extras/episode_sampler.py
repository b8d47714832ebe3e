"""Generate episodes: responses of several turns that a program in a worker process asks for."""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import count
from multiprocessing.connection import Connection

from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.algorithms.rollout.sampler import RunSampler, greedy_sampling
from lightrft.config.sections import RolloutSection
from lightrft.core.engine import ABORTED, Ended, Request, derived_seed
from lightrft.core.groups import Group
from lightrft.core.sampler import GroupSlots, PendingRequest, RolloutLoop
from lightrft.core.samples import Completion, Sample
from lightrft.extras.agents.episode_state import RequestedTurn
from lightrft.extras.agents.episodes import Episodes
from lightrft.strategy.shared_session import SharedSession
from lightrft.strategy.strategy import StrategyBase

TOOLS = 0.02
"""Seconds that an engine without requests waits for the programs of episodes before the ranks
exchange counts again."""


class EpisodeLoop(RolloutLoop):
    """Generates groups of episodes: a turn is one request, sent when a program asks for it.

    Each rank runs a share of the data replica's episodes. A rank therefore adds requests at moments
    when the others add none.

    If turns begin `together`, which requests meet in a batch of the engine does not depend on how
    long programs take: a turn begins when no other one runs, and every program has asked for its
    next turn or has ended.
    """

    sampler: "EpisodeSampler"
    session: SharedSession

    def __init__(self, sampler: "EpisodeSampler", session: SharedSession, seed: int):
        super().__init__(sampler, session, seed)
        self.episodes = sampler.episodes
        self._turns: dict[int, RequestedTurn] = {}
        """Index of a request -> turn."""
        self._asked: list[RequestedTurn] = []
        """Turns that programs wait for, and that have not begun."""

    def add(self, groups: list[GroupSlots]) -> None:
        """Begin this rank's share of the episodes of some groups."""
        self.groups |= {group.number: group for group, _ in groups}
        samples = [
            (group.responses[slot], group.number, slot) for group, slots in groups for slot in slots
        ]
        # Ranks that share a replica get the same groups, so they deal the episodes round robin.
        ranks = self.session.model_parallel
        for sample, *seed_numbers in samples[ranks.rank :: ranks.size]:
            self.episodes.begin(sample, *seed_numbers)

    def attach(self, group: Group, socket: Connection) -> None:
        """Begin a group of one episode with a program that sends requests over a socket."""
        self.groups[group.number] = group
        self.episodes.attach(group.samples[0], socket, group.number, 0)

    def forget(self, groups: list[Group]) -> None:
        """Forget complete groups, and the turns that the engine still samples for them."""
        for group in groups:
            del self.groups[group.number]

        turns = self._turns.items()
        left = {index for index, turn in turns if turn.state.sample.group not in self.groups}
        self.session.drop(left)
        for index in left:
            del self._pending[index], self._turns[index]

    def steps(self, most: int | None = None) -> Iterator[Group]:
        for _ in count() if most is None else range(most):
            yield from self._play()
            if self.session.running:
                yield from self._extend(self.session.step())
            elif not self.session.on_any_rank(bool(self.episodes.running)):
                return

    def _play(self) -> Iterator[Group]:
        """Start the turns that programs wait for; yield the groups whose last episode has ended."""
        turns = []
        for turn in self._next():
            group = self.groups[turn.state.sample.group]
            request = self.sampler.next_turn(turn, group, self.seed)
            problem = self.sampler.strategy.engine.problem(request)
            if problem:
                # The program gets the problem as an answer, so one long turn does not end the run.
                self.episodes.refuse(turn, problem)
            else:
                turns.append((turn, request, group))

        indices = self.session.add_local([request for _, request, _ in turns])
        for index, (turn, request, group) in zip(indices, turns, strict=True):
            self._turns[index] = turn
            self._pending[index] = PendingRequest(request, group, [turn.state.seed_numbers[1]])

        for number in {sample.group for sample in self.episodes.take_ended()}:
            if self.groups[number].complete:
                yield self.groups[number]

    def _next(self) -> list[RequestedTurn]:
        """Return the turns that begin now."""
        if self.session.running:
            self._asked += self.episodes.poll(0)
        elif self.episodes.busy or not self.sampler.together:
            with self.sampler.strategy.trace.phase("tools", idle=True):
                self._asked += self.episodes.poll(TOOLS)

        if self.sampler.together and (
            self.session.running or self.session.on_any_rank(self.episodes.busy)
        ):
            return []
        # Programs ask in an order that depends on time.
        asked = sorted(self._asked, key=lambda turn: turn.seed_numbers)
        self._asked = []
        return [turn for turn in asked if self.episodes.is_active(turn.state)]

    def finish(self) -> Iterator[Group]:
        """Take over the samples of the other ranks; yield the groups that they complete."""
        if self.session.model_parallel.size == 1:
            return

        incomplete = [group for group in self.groups.values() if not group.complete]
        local = {
            (group.number, slot): sample
            for group in self.groups.values()
            for slot, sample in enumerate(group.responses)
            if sample.finish_reason is not None
        }
        for others in self.session.model_parallel.gather(local):
            # Groups hold on to their samples, so the fields are copied into the existing objects.
            for (number, slot), sample in others.items():
                sample_of_rank = self.groups[number].responses[slot]
                for item in fields(Sample):
                    setattr(sample_of_rank, item.name, getattr(sample, item.name))

        yield from (group for group in incomplete if group.complete)

    def abort(self) -> None:
        super().abort()
        self.episodes.abort()
        self._asked = []

    def running(self) -> set[tuple[int, int]]:
        return {play.seed_numbers for play in self.episodes.running}

    def _extend(self, finished: Ended) -> Iterator[Group]:
        """Hand sampled turns to the episodes. It yields nothing: programs decide when to end."""
        for index, completions in finished:
            del self._pending[index]
            self._take_turn(self._turns.pop(index), completions[0])
        yield from ()

    def _take_turn(self, turn: RequestedTurn, completion: Completion) -> None:
        if not self.episodes.is_active(turn.state):  # its program has ended without the turn
            return
        sample = turn.conversation
        self.sampler.extend(sample, completion)
        if completion.finish_reason != ABORTED:
            self.episodes.generated(turn, completion, sample.text)


class EpisodeSampler(RunSampler):
    """Generates responses of several turns."""

    divides_groups = False

    def __init__(
        self,
        strategy: StrategyBase,
        tokenizer: Tokenizer,
        section: RolloutSection,
        episodes: Episodes,
        *,
        together: bool = False,
    ):
        """Set up the sampler of a rank.

        With `together` turns wait for the programs of all episodes of the engine, so that a run
        repeats to the last bit. Otherwise each begins as soon as its program asks for it.
        """
        super().__init__(strategy, tokenizer, section)
        self.episodes = episodes
        self.together = together

    def open(self, seed: int) -> EpisodeLoop:
        self.episodes.draw = seed
        session = self.strategy.open_generation(self.sampling, shared=True)
        self.loop = EpisodeLoop(self, session, seed)
        return self.loop

    def prepare(self, groups: list[GroupSlots], seed: int) -> list[PendingRequest] | None:
        """Return None: a turn is unknown until a program asks for it."""
        return None

    def next_turn(self, turn: RequestedTurn, group: Group, seed: int) -> Request:
        """Build the request for a turn of an episode."""
        sample = turn.conversation
        wanted = turn.request
        limits = [self.episodes.section.turn_max_len, wanted.max_tokens]
        longest = min((limit for limit in limits if limit is not None), default=None)
        most = self.section.generate_max_len
        if longest:
            most = min(most, len(sample.token_ids) + longest)

        if any(turn.state.sample is each for each in group.others):
            stop = (*self.section.stop, *wanted.stop)
            sampling = greedy_sampling(self.section, max_tokens=most, stop=stop)
            return replace(self.request(sample, sampling, ()), group=None)

        seeds = (derived_seed(seed, *turn.seed_numbers),)
        stop = (*self.sampling.stop, *wanted.stop)
        sampling = replace(self.sampling, n=1, stop=stop, **wanted.sampling)
        request = self.request(sample, replace(sampling, max_tokens=most), seeds)
        return replace(request, group=group.number)

    def extend(self, sample: Sample, completion: Completion) -> None:
        """Append a turn; the program decides when the response ends.

        The tokens of an episode include observations, and only the new turn is the model's answer.
        """
        sample.extend(completion)
        if completion.finish_reason != ABORTED:
            sample.text = self.decode(completion.token_ids)
