"""Run short rounds, and defer the prompts with long responses to rounds of their own (RollPacker,
arXiv 2509.21009).

A round starts more prompts than a step needs, and ends when enough groups are complete. The others
begin anew in a later step, so nothing is lost, and every token is of the newest weights.
"""

DeferredGroup = tuple[int, int, int]
"""Group that begins anew: how often it was not complete in time, its number, and its row."""


def next_tail_round(
    deferred: list[DeferredGroup], rows_left: int, *, batch: int, ahead: int
) -> tuple[list[DeferredGroup], int]:
    """Return the deferred groups, and the number of new prompts, of the next round of a step that
    needs `batch` groups.

    A round has `ahead` groups and ends when `batch` of them are complete. Groups that were deferred
    equally often are about as long, so they run together when there are enough of them. Only the
    last round of an epoch, when `rows_left` prompts have not begun, has `batch` groups and runs to
    the end. `deferred` is sorted, least often deferred first.
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
    """Return the deferred groups with those of a round that are not learned from.

    Groups that were not complete wait for a longer round.
    """
    again = [(times + (number not in complete), number, row) for times, number, row in left]
    return sorted([*deferred, *again])
