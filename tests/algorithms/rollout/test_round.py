"""Who generates which responses: the shared queue, predictions, and an assignment's end."""

from lightrft.algorithms.schedulers.assignment import Assignment, chunks_of


def test_a_group_is_divided_into_few_chunks_of_nearly_the_same_size():
    def sizes(num_responses: int, divided: bool = True) -> list[int]:
        return [len(chunk.responses) for chunk in chunks_of(0, num_responses, divided=divided)]

    assert sizes(16, divided=False) == [16]
    assert [sizes(n) for n in (1, 4, 8, 16, 17)] == [
        [1],
        [4],
        [4, 4],
        [4, 4, 4, 4],
        [3, 3, 4, 3, 4],
    ]
    assert [slot for chunk in chunks_of(5, 17, divided=True) for slot in chunk.responses] == list(
        range(17)
    )


def owned(assignment: Assignment) -> list[tuple[int, int, int]]:
    """Return (group, first response, rank) of each chunk that has begun, in order."""
    return [
        (
            assignment.chunks[index].group,
            assignment.chunks[index].responses.start,
            assignment.owners[index],
        )
        for index in assignment.started
    ]


def test_the_longest_begin_first_and_are_spread_over_ranks():
    assignment = Assignment(
        [5, 90], [None, None], 8, num_ranks=2, needed=2, at_once=8, divided=True
    )
    assert owned(assignment) == [(1, 0, 0), (1, 4, 1), (0, 0, 0), (0, 4, 1)] and not assignment.open


def test_ended_responses_predict_the_others_of_their_prompt():
    """One rank generates one chunk of four at a time.

    After a long response to prompt 2, the other chunk of that prompt comes before those expected.
    """
    assignment = Assignment(
        [8, 6, 4], [None] * 3, 8, num_ranks=1, needed=3, at_once=1, divided=True
    )
    assert owned(assignment) == [(0, 0, 0)]

    def end(index: int, tokens: int) -> None:
        running = [0] * len(assignment.chunks)
        totals[index] = tokens
        assignment.begin_exchange()
        assignment.decide(running, totals)

    totals = [0] * len(assignment.chunks)
    end(0, 4 * 3)
    assert owned(assignment)[-1] == (1, 0, 0), "group 0 is short: the mean of its responses is 3"
    end(2, 4 * 2)
    assert owned(assignment)[-1] == (2, 0, 0)
    end(4, 4 * 50)
    assert owned(assignment)[-1] == (2, 4, 0) and assignment.complete == set()
    end(5, 4 * 50)
    assert owned(assignment)[-1] == (0, 4, 0) and assignment.complete == {2}
    end(1, 4 * 3)
    end(3, 4 * 2)
    assert assignment.over and assignment.complete == {0, 1, 2}


def test_first_chunks_come_before_others_that_are_expected_to_be_as_long():
    assignment = Assignment(
        [7, 7, 7], [None] * 3, 8, num_ranks=2, needed=3, at_once=12, divided=True
    )
    assert owned(assignment) == [(0, 0, 0), (1, 0, 1), (2, 0, 0), (0, 4, 1), (1, 4, 0), (2, 4, 1)]


def test_a_chunk_begins_instead_of_responses_that_have_ended():
    """Five responses of two chunks of four have ended.

    So an engine that decodes eight has room for one more chunk, and not for two.
    """
    assignment = Assignment([9] * 4, [None] * 4, 4, num_ranks=1, needed=4, at_once=7, divided=True)
    assert len(assignment.started) == 2
    assignment.begin_exchange()
    assignment.decide([2, 4, 0, 0], [18, 0, 0, 0])
    assert len(assignment.started) == 3 and assignment.complete == set()


def test_chunks_that_begin_after_a_count_are_not_complete_by_it():
    assignment = Assignment([1, 1], [None, None], 1, num_ranks=1, needed=2, at_once=1, divided=True)
    assignment.begin_exchange()
    assignment.decide([0, 0], [5, 0])
    assert assignment.complete == {0} and len(assignment.started) == 2
    assignment.decide([0, 0], [5, 0])
    assert assignment.complete == {0}


def test_groups_with_a_rank_stay_whole_and_count_as_its_load():
    assignment = Assignment(
        [9, 9, 9], [1, None, None], 4, num_ranks=2, needed=3, at_once=8, divided=True
    )
    assert owned(assignment) == [(0, 0, 1), (1, 0, 0), (2, 0, 0)]
    assert owned(Assignment([9], [1], 16, num_ranks=2, needed=1, divided=True)) == [(0, 0, 1)]
