"""Generate responses to prompts with the strategy's engine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import NamedTuple

from lightrft.core.engine import ABORTED, Decoding, Ended, Request, RequestLoop, derived_seed
from lightrft.core.groups import Group
from lightrft.core.samples import Completion, Sample
from lightrft.core.strategy import Strategy

GroupSlots = tuple[Group, Sequence[int]]
"""A group, and the slots of the responses to generate here."""


class PendingRequest(NamedTuple):
    """A request, the group that it extends, and the slots of the extended responses."""

    request: Request
    group: Group
    slots: list[int]


@dataclass(eq=False)
class Sampler:
    """Generates the responses of groups. Ranks of one data replica make the same calls."""

    strategy: Strategy
    decode: Callable[[list[int]], str]
    """Returns the text of tokens, without special ones."""
    sampling: Decoding
    loop: "RolloutLoop | None" = field(default=None, init=False)
    """The loop that was opened last."""
    companions: "list[Callable[[RolloutLoop], None]]" = field(default_factory=list, init=False)
    """What begins groups of its own in each loop that is opened."""

    def open(self, seed: int) -> "RolloutLoop":
        """Open a loop for groups. All ranks open it together."""
        self.loop = RolloutLoop(self, self.strategy.open_generation(self.sampling), seed)
        for begin in self.companions:
            begin(self.loop)
        return self.loop

    def requests(self, group: Group, slots: Sequence[int], seed: int) -> Iterator[PendingRequest]:
        """Yield the requests for these responses of a group.

        New responses share one request, so the prompt is computed once. A response that continues
        has a request of its own.
        """
        unfinished = [slot for slot in slots if group.responses[slot].finish_reason is None]
        together = [slot for slot in unfinished if not group.responses[slot].token_ids]
        alone = [[slot] for slot in unfinished if slot not in together]
        for chosen in [together, *alone] if together else alone:
            sampling = replace(self.sampling, n=len(chosen))
            seeds = tuple(derived_seed(seed, group.number, slot) for slot in chosen)
            request = self.request(group.responses[chosen[0]], sampling, seeds)
            yield PendingRequest(request, group, chosen)

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
    depends on `seed`, the group's number and the slot in the group, but not on the rank.
    """

    sampler: Sampler
    session: RequestLoop
    seed: int
    groups: dict[int, Group] = field(default_factory=dict, init=False)
    """Number -> group that has begun here."""
    _pending: dict[int, PendingRequest] = field(default_factory=dict, init=False)
    """Index of a request -> what it extends."""

    def add(self, groups: Sequence[GroupSlots]) -> None:
        """Begin or continue unfinished responses. Ranks that share an engine call it together."""
        requests = (self.sampler.requests(group, slots, self.seed) for group, slots in groups)
        self.begin(list(chain.from_iterable(requests)))

    def begin(self, pending: list[PendingRequest]) -> None:
        """Begin requests that the sampler has built for this loop's seed, as add() does."""
        self.groups |= {one.group.number: one.group for one in pending}
        indices = self.session.add([one.request for one in pending])
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
        """Stop all responses where they are. Only finish() can complete a group after that."""
        for _ in self._extend(list(self.session.abort().items())):
            pass

    def running(self) -> set[tuple[int, int]]:
        """Return (group number, slot) of each unfinished response that this rank has begun."""
        pending = [self._pending[index] for index in self.session.unfinished]
        return {(one.group.number, slot) for one in pending for slot in one.slots}

    def _extend(self, ended: Ended) -> Iterator[Group]:
        """Append completions to the responses; yield the groups that are now complete."""
        for index, completions in ended:
            pending = self._pending.pop(index)
            for slot, completion in zip(pending.slots, completions, strict=True):
                self.sampler.extend(pending.group.responses[slot], completion)
            if pending.group.complete:
                yield pending.group
