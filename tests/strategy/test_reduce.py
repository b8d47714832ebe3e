import pytest
import torch

from lightrft.models.parallel.mesh import collectives_begun
from lightrft.strategy import FSDPStrategy
from ranks import run_ranks
from strategy.training import strategy


def reduced():
    """Everything on rank r is r + 1, so that mean, sum, max, min of two ranks are 1.5, 3, 2, 1."""
    made = strategy()
    mine = made.get_rank() + 1
    half = torch.full((2,), mine, dtype=torch.bfloat16)
    results = {
        op: made.all_reduce(
            {"int": mine, "float": float(mine), "tensor": half, "ids": torch.tensor(mine)}, op
        )
        for op in ("mean", "sum", "max", "min")
    }
    first = mine == 1
    flags = (
        made.all_reduce({"any": first}, "max"),
        made.all_reduce(first, "min"),
        made.all_reduce(torch.tensor([first]), "sum"),
    )
    big = made.all_reduce(torch.tensor(2**53 + 1), "max")

    return results, flags, big, half, made.all_reduce(mine, "sum"), made.all_reduce({})


def test_all_reduce_keeps_types():
    for rank, (results, flags, big, half, number, empty) in enumerate(run_ranks(2, reduced)):
        for op, expected in {"mean": 1.5, "sum": 3, "max": 2, "min": 1}.items():
            found = results[op]
            assert found["int"] == expected and isinstance(
                found["int"], float if op == "mean" else int
            )
            assert found["float"] == expected and isinstance(found["float"], float)
            assert (
                found["tensor"].tolist() == [expected] * 2
                and found["tensor"].dtype == torch.bfloat16
            )
            assert found["ids"].item() == expected and found["ids"].dtype == (
                torch.float32 if op == "mean" else torch.int64
            )

        assert flags[0] == {"any": True} and flags[1] is False and flags[2].tolist() == [1]
        assert big.item() == 2**53 + 1
        assert half.tolist() == [rank + 1] * 2, "the caller's tensor has changed"
        assert number == 3 and isinstance(number, int)
        assert empty == {}


class Doubled(FSDPStrategy):
    def all_reduce(self, data, op="mean"):
        return 2 * super().all_reduce(data, op)


def begun():
    made = strategy()
    mine = torch.tensor(made.get_rank() + 1.0)
    wait = made.begin_sum(mine)
    doubled = Doubled()
    doubled._mesh = made._mesh
    doubled.data = made.data
    return wait(), doubled.begin_sum(mine)(), mine


def test_a_sum_can_begin_early_also_with_an_all_reduce_of_ones_own():
    for rank, (total, doubled, mine) in enumerate(run_ranks(2, begun)):
        assert (total, doubled, mine) == (3, 6, rank + 1)


def objects_of_ranks(size: int) -> tuple[list[object], int]:
    """Return the gathered objects, and the number of collectives that it took."""
    axis = strategy().world
    before = sum(collectives_begun().values())
    gathered = axis.gather(("a" * size * axis.rank, None))
    return gathered, sum(collectives_begun().values()) - before


@pytest.mark.parametrize(("size", "count"), [(0, 1), (100, 1), (10_000, 2)])
def test_small_objects_are_gathered_at_once(size, count):
    for gathered, taken in run_ranks(2, objects_of_ranks, size):
        assert gathered == [("", None), ("a" * size, None)]
        assert taken == count


def gathered():
    made = strategy()
    rank = made.get_rank()
    mine = {"n": rank, "scalar": torch.tensor(float(rank)), "rows": torch.full((rank, 2), rank)}
    return made.all_gather(mine), made.all_gather(rank + 0.5)


def test_all_gather_joins_unequal_shares():
    for found, numbers in run_ranks(3, gathered):
        assert found["n"] == [0, 1, 2]
        assert found["scalar"].tolist() == [0, 1, 2]
        assert found["rows"].tolist() == [[1, 1], [2, 2], [2, 2]]
        assert numbers == [0.5, 1.5, 2.5]


def test_works_before_the_process_group_exists():
    made = FSDPStrategy()
    tensor = torch.ones(2)
    result = made.all_reduce(tensor, "max")
    result += 1
    assert tensor.tolist() == [1, 1], "the result is the caller's own tensor"
    assert made.all_reduce({"a": 1}, "mean") == {"a": 1.0}
    assert made.all_gather(3) == [3]


def test_errors_name_what_is_known():
    with pytest.raises(ValueError, match="unknown op 'avg'"):
        FSDPStrategy().all_reduce(1, "avg")
    with pytest.raises(TypeError, match="not str"):
        FSDPStrategy().all_reduce({"a": "text"})
