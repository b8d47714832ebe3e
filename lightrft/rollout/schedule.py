"""Decide which rank generates which groups of a round, and when the round is over: alike on all ranks, from exchanged counts."""

from collections.abc import Sequence

Parked = tuple[int, int, int]
"""Group of tail rounds that waits to begin anew: how often it was not complete in time, its number, and its row."""

AHEAD = 4
"""Largest number of groups of a rank for each that its engine decodes at once."""


def room_for(at_once: int, n: int) -> int:
    """Return how many incomplete groups a rank has whose engine decodes `at_once` groups of n responses at the same time.

    The responses of a group do not end together, and the engine begins those of other groups in their place. The longest of n
    log-normal responses (sigma 1) takes three times as long as the mean at n = 8, and four times at 16.
    """
    return at_once * min(n, AHEAD)


def next_tail_round(parked: list[Parked], rows_left: int, *, batch: int, ahead: int) -> tuple[list[Parked], int]:
    """Return the parked groups, and the number of new prompts, of the next round of a step that needs `batch` groups.

    A round has `ahead` groups and ends when `batch` of them are complete. Groups that were parked equally often are about as
    long, so they are run together, when there are enough of them. Only the last round of a pass over the data, of which
    `rows_left` prompts have not begun, has `batch` groups and runs to the end. `parked` is sorted: least often parked first.
    """
    for times in sorted({times for times, _, _ in parked}, reverse=True):
        alike = [each for each in parked if each[0] == times]
        if len(alike) >= ahead:
            return alike[:ahead], 0
    if rows_left >= ahead:
        return [], ahead
    if rows_left + len(parked) >= ahead:
        return parked[: ahead - rows_left], rows_left
    again = parked[:batch]
    return again, batch - len(again)


class Round:
    """Groups that all ranks generate together. Every rank has the same, and takes the same decisions from the same counts.

    Ranks go on decoding while the counts of one point are exchanged, and decide by them at the next point. Points are numbers of
    steps of an engine, so decisions do not depend on time if the steps of an engine do not.
    """

    def __init__(self, costs: Sequence[float], owners: Sequence[int | None], *, num_ranks: int, needed: int, room: int = 1):
        """Set up a round of groups with these expected costs.

        `owners`: rank of each group; None: the group waits until a rank has less than `room` incomplete groups, and those with
        the highest cost come first. `needed`: number of complete groups that end the round.
        """
        self.owners, self.num_ranks, self.needed, self.room = list(owners), num_ranks, needed, room
        waiting = [place for place, owner in enumerate(owners) if owner is None]
        self.waiting = sorted(waiting, key=lambda place: (-costs[place], place))
        self.begun = [place for place, owner in enumerate(owners) if owner is not None]
        """Groups that have a rank, in the order in which they got it."""
        self.complete: set[int] = set()
        self._counted: list[int] = []
        self._assign()

    @property
    def open(self) -> bool:
        """Return True if there is something to decide: groups wait, or the round may end before all are complete."""
        return bool(self.waiting) or self.needed < len(self.owners)

    @property
    def over(self) -> bool:
        return len(self.complete) >= self.needed

    def begin_exchange(self) -> None:
        """Note which groups the counts include that are taken now."""
        self._counted = list(self.begun)

    def decide(self, running: Sequence[int]) -> None:
        """Take the number of requests of each group that ran on all ranks at the last point; assign groups that wait."""
        self.complete = {place for place in self._counted if not running[place]}
        if not self.over:
            self._assign()

    def _assign(self) -> None:
        loads = [0] * self.num_ranks
        for place in self.begun:
            if place not in self.complete:
                loads[self.owners[place]] += 1
        while self.waiting and min(loads) < self.room:
            rank = loads.index(min(loads))
            self.begun.append(self.waiting.pop(0))
            self.owners[self.begun[-1]] = rank
            loads[rank] += 1
