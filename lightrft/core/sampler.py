"""Generate responses to prompts with the strategy's engine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from lightrft.core.engine import ABORTED, Decoding, Ended, Request, RequestLoop, derived_seed
from lightrft.core.groups import Group
from lightrft.core.samples import Completion, Sample
from lightrft.core.strategy import Strategy

GroupPart = tuple[Group, Sequence[int]]
"""A group, and the places of the responses to generate here."""
Pending = tuple[Request, Group, list[int]]
"""A request, the group that it extends, and the places of the extended responses."""


@dataclass(eq=False)
class Sampler:
    """Generates the responses of groups.

    Ranks that share a data replica make the same calls with the same groups.
    """

    strategy: Strategy
    decode: Callable[[list[int]], str]
    """Returns the text of tokens, without special ones."""
    sampling: Decoding
    loop: "RolloutLoop | None" = field(default=None, init=False)
    """The loop that was opened last."""

    def open(self, seed: int) -> "RolloutLoop":
        """Open a loop for groups. All ranks open it together."""
        self.loop = RolloutLoop(self, self.strategy.open_generation(self.sampling), seed)
        return self.loop

    def pending(self, group: Group, places: Sequence[int], seed: int) -> Iterator[Pending]:
        """Yield the requests for these responses of a group.

        New responses share one request, so the prompt is computed once. A response that continues
        has a request of its own.
        """
        unfinished = [place for place in places if group.responses[place].finish_reason is None]
        together = [place for place in unfinished if not group.responses[place].token_ids]
        alone = [[place] for place in unfinished if place not in together]
        for chosen in [together, *alone] if together else alone:
            sampling = replace(self.sampling, n=len(chosen))
            seeds = tuple(derived_seed(seed, group.number, place) for place in chosen)
            yield self.request(group.responses[chosen[0]], sampling, seeds), group, chosen

    def request(self, sample: Sample, sampling: Decoding, seeds: tuple[int, ...]) -> Request:
        """Build the request that continues a response."""
        return Request(
            [*sample.prompt.token_ids, *sample.token_ids],
            sample.prompt.multi_modal,
            sampling.after(len(sample.token_ids)),
            seeds,
            sample.group,
        )

    def extend(self, sample: Sample, completion: Completion) -> None:
        """Append a completion to a response, and end the response unless it was aborted."""
        sample.extend(completion)
        if completion.finish_reason != ABORTED:
            sample.finish_reason = completion.finish_reason
            sample.text = self.decode(sample.token_ids)


@dataclass(eq=False)
class RolloutLoop:
    """Generates the responses of groups, step by step.

    Ranks that share a data replica make the same calls with the same groups. What a response draws
    depends on `seed`, the group's number and the place in the group, but not on the rank.
    """

    sampler: Sampler
    session: RequestLoop
    seed: int
    groups: dict[int, Group] = field(default_factory=dict, init=False)
    """Number -> group that has begun here."""
    _pending: dict[int, Pending] = field(default_factory=dict, init=False)
    """Index of a request -> what it extends."""

    def add(self, parts: Sequence[GroupPart]) -> None:
        """Begin or continue unfinished responses of groups.

        Ranks that share an engine call it together.
        """
        pending = [self.sampler.pending(group, places, self.seed) for group, places in parts]
        self.begin([each for of_group in pending for each in of_group])

    def begin(self, pending: list[Pending]) -> None:
        """Begin requests that the sampler has built for this loop's seed, as add() does."""
        self.groups |= {group.number: group for _, group, _ in pending}
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

    def _extend(self, ended: Ended) -> Iterator[Group]:
        """Append completions to the responses; yield the groups that are now complete."""
        for index, completions in ended:
            _, group, places = self._pending.pop(index)
            for place, completion in zip(places, completions, strict=True):
                self.sampler.extend(group.responses[place], completion)
            if group.complete:
                yield group
