"""Run short rounds, and give prompts with long responses rounds of their own.

A round starts more prompts than a step needs, and ends when enough groups are complete. The others
begin anew in a later step, so nothing is lost, and every token comes from the newest weights.
RollPacker, arXiv 2509.21009.
"""

DeferredGroup = tuple[int, int, int]
"""A group that begins anew: how often it was late, group number, and row."""


def next_tail_round(
    deferred: list[DeferredGroup], rows_left: int, *, batch: int, ahead: int
) -> tuple[list[DeferredGroup], int]:
    """Return the deferred groups and the number of new prompts for the next round.

    The step still needs `batch` groups. A round has `ahead` groups and ends when `batch` of them
    are complete. Groups that were deferred equally often are about equally long, so they run
    together once there are enough of them. Only the last round of an epoch, when fewer than `ahead`
    groups are left, has `batch` groups and runs to the end. `rows_left`: prompts of the epoch that
    have not begun. `deferred` is sorted, least often deferred first.
    """
    for times in sorted({times for times, _, _ in deferred}, reverse=True):
        equally_often = [each for each in deferred if each[0] == times]
        if len(equally_often) >= ahead:
            return equally_often[:ahead], 0

    if rows_left >= ahead:
        return [], ahead
    if rows_left + len(deferred) >= ahead:
        return deferred[: ahead - rows_left], rows_left

    again = deferred[:batch]
    return again, batch - len(again)


def defer(
    deferred: list[DeferredGroup], left: list[DeferredGroup], *, complete: set[int]
) -> list[DeferredGroup]:
    """Add the groups of a round that are not learned from to the deferred ones.

    Groups that were not complete count as deferred once more, so they wait for a longer round.
    """
    again = [(times + (number not in complete), number, row) for times, number, row in left]
    return sorted([*deferred, *again])
