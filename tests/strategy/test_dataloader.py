import pytest
import torch
from torch.utils.data import WeightedRandomSampler

from lightrft.models.parallel.collectives import Axis
from lightrft.strategy import FSDPStrategy
from lightrft.strategy.dataloader import ResumableBatchSampler
from ranks import run_ranks

ROWS = list(range(100, 120))


def sampler(rank: int = 0, size: int = 1, **options):
    options = {
        "batch_size": 2,
        "shuffle": True,
        "drop_last": True,
        "seed": 3,
        "consumed_samples": 0,
        "rows": 20,
    } | options
    rows, options["row_order"] = range(options.pop("rows")), options.pop("rows_of", None)
    return ResumableBatchSampler(
        rows, options.pop("batch_size"), Axis("data", size, rank, None), **options
    )


def global_order(samplers) -> list[list[int]]:
    """One epoch: the rows of each global batch."""
    return [[row for rows in batches for row in rows] for batches in zip(*samplers, strict=True)]


def test_ranks_see_disjoint_slices_of_one_order():
    whole = global_order([sampler(batch_size=6)])
    sliced = global_order([sampler(rank, 3) for rank in range(3)])
    assert sliced == whole
    assert len({row for batch in sliced for row in batch}) == 18


def test_every_epoch_is_reshuffled_without_being_told():
    one = sampler()
    first = list(one)
    second = list(one)
    assert first != second and sorted(sum(first, [])) == sorted(sum(second, []))
    again = sampler()
    assert [list(again), list(again)] == [first, second]
    again.set_epoch(1)
    assert list(again) == second
    assert list(sampler(seed=4)) != first


def test_without_shuffle_the_order_is_that_of_the_data():
    assert sum(sampler(shuffle=False), []) == list(range(20))


@pytest.mark.parametrize("consumed", [0, 6, 18, 24, 42])
def test_resumes_in_the_middle_of_an_epoch_on_another_number_of_ranks(consumed):
    """18 of the 20 rows are used per epoch."""
    straight = [sampler(rank, 3) for rank in range(3)]
    rows = [row for _ in range(4) for batch in global_order(straight) for row in batch]
    resumed = [sampler(rank, 2, batch_size=3, consumed_samples=consumed) for rank in range(2)]
    for one in resumed:
        one.set_epoch(consumed // 18)
    rest = [row for batch in global_order(resumed) for row in batch]
    assert rest == rows[consumed : consumed + len(rest)] and len(rest) == 18 - consumed % 18
    next_epoch = [sampler(rank, 3, consumed_samples=18 * (consumed // 18 + 1)) for rank in range(3)]
    assert global_order(resumed) == global_order(next_epoch)


def test_without_drop_last_all_ranks_have_the_same_number_of_batches():
    of_ranks = [list(sampler(rank, 3, rows=14, drop_last=False)) for rank in range(3)]
    assert [len(batches) for batches in of_ranks] == [3, 3, 3]
    assert [len(batches[-1]) for batches in of_ranks] == [0, 1, 1]
    assert sorted(row for batches in of_ranks for batch in batches for row in batch) == list(
        range(14)
    )
    assert len(sampler(0, 3, rows=14, drop_last=False)) == 3 and len(sampler(0, 3, rows=14)) == 2


def test_too_few_rows_for_a_batch_is_an_error():
    with pytest.raises(
        ValueError, match="5 rows do not fill one batch of 2 rows on each of 3 data ranks"
    ):
        sampler(rows=5, size=3)


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(
        [1.0] * 10 + [3.0] * 10, 12, generator=torch.Generator().manual_seed(5)
    )


def test_rows_of_a_sampler_of_the_users():
    """A random one draws anew each time; a resumed run draws what was drawn before."""
    drawn = weighted()
    epochs = [list(drawn) for _ in range(3)]
    ranks = [sampler(rank, 3, rows_of=weighted()) for rank in range(3)]
    found = [[row for batch in global_order(ranks) for row in batch] for _ in range(3)]
    assert found == epochs and epochs[0] != epochs[1]
    resumed = [
        sampler(rank, 2, batch_size=3, rows_of=weighted(), consumed_samples=12 + 6)
        for rank in range(2)
    ]
    assert [row for batch in global_order(resumed) for row in batch] == epochs[1][6:]
    assert [row for batch in global_order(resumed) for row in batch] == epochs[2]


def loaded():
    made = FSDPStrategy(seed=3)
    made.setup_distributed()
    loader = made.setup_dataloader(ROWS, 5, collate_fn=tuple)
    plain = made.setup_dataloader(ROWS, 4, shuffle=False, drop_last=False, consumed_samples=8)
    last_first = list(made.setup_dataloader(ROWS, 5, sampler=range(19, -1, -1)))
    begin = 119 - 5 * made.get_rank()
    assert last_first == [
        list(range(begin, begin - 5, -1)),
        list(range(begin - 10, begin - 15, -1)),
    ]

    return [list(loader), list(loader)], list(plain), len(loader)


def test_loader_gives_rows_of_each_data_rank():
    results = run_ranks(2, loaded)
    for epoch in (0, 1):
        assert (
            sorted(row for epochs, _, _ in results for batch in epochs[epoch] for row in batch)
            == ROWS
        )

    assert results[0][0][0] != results[0][0][1]
    assert [plain for _, plain, _ in results] == [
        [[108, 109, 110, 111], [116, 117]],
        [[112, 113, 114, 115], [118, 119]],
    ]
    assert isinstance(results[0][0][0][0], tuple) and results[0][2] == 2
