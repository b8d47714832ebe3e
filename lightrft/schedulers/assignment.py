"""Decide which rank generates which responses of a round, and when it is over: alike on all ranks,
from exchanged counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import ceil

SIBLINGS = 4
"""Largest number of responses of a chunk, whose rank computes their prompt once."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Responses of a group that one rank generates."""

    place: int
    """Place of the group in the round."""
    responses: range
    """Places of the responses in the group."""


def chunks_of(place: int, num_responses: int, *, divided: bool) -> list[Chunk]:
    """Return a group as one chunk, or divided into as few as have at most SIBLINGS responses each,
    of nearly the same size.
    """
    number = ceil(num_responses / SIBLINGS) if divided else 1
    edges = [index * num_responses // number for index in range(number + 1)]
    return [Chunk(place, range(*edge)) for edge in zip(edges, edges[1:], strict=False)]


class Assignment:
    """Groups that all ranks generate together.

    Every rank has the same, and takes the same decisions from the same counts.

    Groups without a rank are divided into chunks, which wait until the engine of a rank has room.
    Those whose responses are expected to be longest come first: as long as the mean of the group's
    responses that have ended, or else as given. Where that is equal, the first chunks of all groups
    come before others, so that their lengths are known soon.

    Ranks go on decoding while the counts of one point are exchanged, and decide by them at the next
    point. Points are numbers of steps of an engine, so decisions do not depend on time if the steps
    of an engine do not.
    """

    def __init__(
        self,
        lengths: Sequence[float],
        ranks: Sequence[int | None],
        num_responses: int,
        *,
        num_ranks: int,
        needed: int,
        at_once: int = 1,
        divided: bool = False,
    ):
        """Set up a round of groups of `num_responses` with these expected lengths, in tokens of a
        response.

        `ranks`: rank of each group; None: its chunks wait, of which there is one unless groups are
        `divided`. `needed`: number of complete groups that end the round. `at_once`: number of
        responses that the engine of a rank decodes at the same time.
        """
        self.lengths = list(lengths)
        self.num_groups = len(lengths)
        self.num_ranks = num_ranks
        self.needed = needed
        self.chunks = [
            chunk
            for place, rank in enumerate(ranks)
            for chunk in chunks_of(place, num_responses, divided=divided and rank is None)
        ]
        self.owners = [ranks[chunk.place] for chunk in self.chunks]
        self.at_once = at_once
        self.waiting = [index for index, rank in enumerate(self.owners) if rank is None]
        """Indices of chunks without a rank, the next one last."""
        self.started = [index for index, rank in enumerate(self.owners) if rank is not None]
        """Indices of chunks that have a rank, in the order in which they got it."""
        self.complete: set[int] = set()
        """Places of groups whose responses have all ended."""
        self._counted: list[int] = []
        self._running = [len(chunk.responses) for chunk in self.chunks]
        """Number of responses of each chunk that have not ended, as far as it is known."""
        self._assign()

    @property
    def open(self) -> bool:
        """Return True if there is something to decide: chunks wait, or the round may end before all
        are complete.
        """
        return bool(self.waiting) or self.needed < self.num_groups

    @property
    def over(self) -> bool:
        return len(self.complete) >= self.needed

    def begin_exchange(self) -> None:
        """Note which chunks the counts include that are taken now."""
        self._counted = list(self.started)

    def decide(self, running: Sequence[int], tokens: Sequence[int]) -> None:
        """Take the counts of each chunk on all ranks at the last point, and assign chunks that
        wait.

        `running`: responses that ran; `tokens`: sum of the lengths of those that had ended.
        """
        for index in self._counted:
            self._running[index] = running[index]
        incomplete = {
            chunk.place
            for chunk, running in zip(self.chunks, self._running, strict=True)
            if running
        }
        self.complete = set(range(self.num_groups)) - incomplete

        if self.waiting and not self.over:
            self._predict(tokens)
            self._assign()

    def _predict(self, tokens: Sequence[int]) -> None:
        """Set the expected lengths of groups of which responses have ended to the mean of these."""
        sums: dict[int, list[int]] = {}
        for index in self._counted:
            chunk = self.chunks[index]
            ended = sums.setdefault(chunk.place, [0, 0])
            ended[0] += len(chunk.responses) - self._running[index]
            ended[1] += tokens[index]
        self.lengths = [
            sums[place][1] / sums[place][0] if sums.get(place, (0,))[0] else length
            for place, length in enumerate(self.lengths)
        ]

    def _assign(self) -> None:
        """Give chunks to the ranks with the fewest unfinished responses, and of these to those that
        expect the fewest tokens.
        """
        loads = [(0, 0.0, rank) for rank in range(self.num_ranks)]
        for index in self.started:
            loads[self.owners[index]] = self._with(loads[self.owners[index]], index)
        heapify(loads)
        self.waiting.sort(key=self._priority)
        while self.waiting and loads[0][0] < self.at_once:
            index = self.waiting.pop()
            self.owners[index] = loads[0][2]
            self.started.append(index)
            heapreplace(loads, self._with(loads[0], index))

    def _priority(self, index: int) -> tuple[float, int, int]:
        """Return a number of a chunk that is the higher the sooner it begins: first ones predict
        the others of their groups.
        """
        chunk = self.chunks[index]
        return self.lengths[chunk.place], -chunk.responses.start, -index

    def _with(self, load: tuple[int, float, int], index: int) -> tuple[int, float, int]:
        """Return the load (responses, expected tokens, rank) of a rank with one more chunk."""
        responses, tokens, rank = load
        running = self._running[index]
        length = self.lengths[self.chunks[index].place]
        return responses + running, tokens + running * length, rank
