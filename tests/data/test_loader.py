"""Which rows a step takes: every row once per pass, and nothing to remember for a resumed run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.data.loader import StepOrder, share_of


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1000))
def test_every_pass_takes_rows_once(num_rows, batch_size, seed):
    batch_size = min(batch_size, num_rows)
    order = StepOrder(num_rows, batch_size, seed)
    assert order.steps_per_pass == num_rows // batch_size
    for number in range(3):
        steps = range(number * order.steps_per_pass, (number + 1) * order.steps_per_pass)
        taken = [row for step in steps for row in order.rows(step)]
        assert len(taken) == len(set(taken)) == order.steps_per_pass * batch_size
        assert set(taken) <= set(range(num_rows))


def test_passes_differ_and_so_do_seeds():
    order = StepOrder(100, 100, seed=1)
    assert order.rows(0) != order.rows(1) != list(range(100))
    assert order.rows(0) != StepOrder(100, 100, seed=2).rows(0)
    assert sorted(order.rows(0)) == sorted(order.rows(1)) == list(range(100))


def test_rows_that_are_left_over_come_in_other_passes():
    order = StepOrder(5, 2, seed=0)
    assert {row for step in range(20) for row in order.rows(step)} == set(range(5))


def test_a_step_needs_no_history():
    whole = [StepOrder(17, 4, seed=3).rows(step) for step in range(12)]
    assert [StepOrder(17, 4, seed=3).rows(step) for step in reversed(range(12))] == whole[::-1]


def test_fewer_rows_than_a_batch():
    with pytest.raises(ValueError, match="7 rows of data do not fill one batch of 8"):
        StepOrder(7, 8, seed=0)
    assert StepOrder(8, 8, seed=0).steps_per_pass == 1


@given(st.integers(1, 9), st.integers(0, 50))
def test_shares_are_consecutive_and_differ_by_one_at_most(size, count):
    shares = [share_of(rank, size, count) for rank in range(size)]
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
