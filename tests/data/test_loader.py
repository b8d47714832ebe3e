"""Which rows come next: every row once per pass, with nothing to remember for a resumed run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.core.order import Order, fair_owners
from lightrft.data.loader import DRAWS_AT_ONCE, Blend, share_of


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 1000))
def test_every_pass_takes_rows_once(num_rows, batch_size, seed):
    order = Order(num_rows, seed)
    line = [
        row for first in range(0, 3 * num_rows, batch_size) for row in order.rows(first, batch_size)
    ]
    for start in range(0, 3 * num_rows, num_rows):
        assert sorted(line[start : start + num_rows]) == list(range(num_rows))


def test_passes_differ_and_so_do_seeds():
    order = Order(100, seed=1)
    assert order.rows(0, 100) != order.rows(100, 100) != list(range(100))
    assert order.rows(0, 100) != Order(100, seed=2).rows(0, 100)


def test_a_batch_needs_no_history():
    whole = Order(17, seed=3).rows(0, 60)
    assert [Order(17, seed=3).rows(first, 5) for first in range(55, -1, -5)] == [
        whole[i : i + 5] for i in range(55, -1, -5)
    ]


SIZES = (7, 300, 20)
PROBABILITIES = (0.5, 0.3, 0.2)


def blend(seed: int = 3) -> Blend:
    return Blend([Order(size, seed=5) for size in SIZES], PROBABILITIES, seed)


def test_a_blend_draws_with_its_probabilities_in_every_batch():
    line = blend().rows(0, 3 * DRAWS_AT_ONCE)
    counts = [
        sum(first <= row < first + size for row in line)
        for first, size in ((0, 7), (7, 300), (307, 20))
    ]
    assert sum(counts) == len(line)
    for count, p in zip(counts, PROBABILITIES, strict=True):
        assert abs(count - p * len(line)) < 4 * (len(line) * p * (1 - p)) ** 0.5

    of_batches = [
        sum(row < 7 for row in line[first : first + 64]) for first in range(0, len(line), 64)
    ]
    assert 10 < min(of_batches) < 32 < max(of_batches) < 54, "binomial with mean 32 and deviation 4"


def test_a_blend_takes_the_rows_of_each_data_set_in_its_order():
    line = blend().rows(0, 2000)
    first = 0
    for size in SIZES:
        of_set = [row - first for row in line if first <= row < first + size]
        assert of_set == Order(size, seed=5).rows(0, len(of_set))
        first += size


def test_a_blend_needs_no_history():
    whole = blend().rows(0, 2 * DRAWS_AT_ONCE + 99)
    positions = [2 * DRAWS_AT_ONCE + 7, 5, DRAWS_AT_ONCE - 3, DRAWS_AT_ONCE, 0]
    assert [blend().rows(first, 50) for first in positions] == [
        whole[first : first + 50] for first in positions
    ]
    assert (
        blend().rows(DRAWS_AT_ONCE - 3, DRAWS_AT_ONCE + 6)
        == whole[DRAWS_AT_ONCE - 3 : 2 * DRAWS_AT_ONCE + 3]
        and blend(4).rows(0, 50) != whole[:50]
    )


def test_in_an_epoch_of_a_blend_every_row_is_drawn_once_or_more_on_average():
    assert blend().num_rows == 1000
    assert Blend([Order(3, 0), Order(9, 0)], [1, 3], 0).num_rows == 12


@given(st.integers(1, 9), st.integers(0, 50))
def test_shares_are_consecutive_and_differ_by_one_at_most(size, count):
    shares = [share_of(rank, size, count) for rank in range(size)]
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 9), st.lists(st.floats(0.1, 100.0), max_size=40))
def test_fair_shares_are_consecutive_and_near_the_mean(size, costs):
    owners = fair_owners(size, costs)
    assert owners == sorted(owners) and len(owners) == len(costs)
    work = [
        sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank)
        for rank in range(size)
    ]
    assert max(work) <= sum(costs) / size + max(costs, default=0) + 1e-6


@pytest.mark.parametrize("cost", [1.0, 0.1, 37.3])
@given(st.integers(1, 9), st.integers(0, 50))
def test_fair_shares_of_equal_things_are_equal(cost, size, count):
    assert fair_owners(size, [cost] * count) == [
        rank for rank in range(size) for _ in share_of(rank, size, count)
    ]
