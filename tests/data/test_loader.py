"""Which rows come next: every row once per pass, and nothing to remember for a resumed run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.data.loader import Order, fair_share, share_of


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 1000))
def test_every_pass_takes_rows_once(num_rows, batch_size, seed):
    order = Order(num_rows, seed)
    line = [row for first in range(0, 3 * num_rows, batch_size) for row in order.rows(first, batch_size)]
    for start in range(0, 3 * num_rows, num_rows):
        assert sorted(line[start : start + num_rows]) == list(range(num_rows))


def test_passes_differ_and_so_do_seeds():
    order = Order(100, seed=1)
    assert order.rows(0, 100) != order.rows(100, 100) != list(range(100))
    assert order.rows(0, 100) != Order(100, seed=2).rows(0, 100)


def test_a_batch_needs_no_history():
    whole = Order(17, seed=3).rows(0, 60)
    assert [Order(17, seed=3).rows(first, 5) for first in range(55, -1, -5)] == [whole[i : i + 5] for i in range(55, -1, -5)]


@given(st.integers(1, 9), st.integers(0, 50))
def test_shares_are_consecutive_and_differ_by_one_at_most(size, count):
    shares = [share_of(rank, size, count) for rank in range(size)]
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 9), st.lists(st.floats(0.1, 100.0), max_size=40))
def test_fair_shares_are_consecutive_and_near_the_mean(size, costs):
    shares = [fair_share(rank, size, costs) for rank in range(size)]
    assert [row for share in shares for row in share] == list(range(len(costs)))
    work = [sum(costs[index] for index in share) for share in shares]
    assert max(work) <= sum(costs) / size + max(costs, default=0) + 1e-6


@pytest.mark.parametrize("cost", [1.0, 0.1, 37.3])
@given(st.integers(1, 9), st.integers(0, 50))
def test_fair_shares_of_equal_things_are_equal(cost, size, count):
    assert [fair_share(rank, size, [cost] * count) for rank in range(size)] == [share_of(r, size, count) for r in range(size)]
