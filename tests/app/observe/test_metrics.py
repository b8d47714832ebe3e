"""Why: a metric must be the same number whatever rank or micro-batch an element was in, and never
rank 0's share.
"""

import math

import pytest
import torch

from lightrft.core.metrics import Metrics
from ranks import run_ranks


class One:
    """An axis of a single rank."""

    def gather(self, value):
        return [value]


def two_ranks():
    import torch.distributed as dist

    class World:
        def gather(self, value):
            gathered = [None, None]
            dist.all_gather_object(gathered, value)
            return gathered

    rank = dist.get_rank()
    metrics = Metrics()
    # tokens 1, 2, 3 learned on rank 0 in two micro-batches; 10 on rank 1, whose other token is
    # masked and not even finite
    if rank == 0:
        metrics.mean("kl", torch.tensor([1.0, 2.0]), torch.tensor([True, True]))
        metrics.mean("kl", torch.tensor([3.0]), torch.tensor([True]))
        metrics.std("reward", torch.tensor([1000.0, 1000.001], dtype=torch.float64))
        metrics.max("gap", torch.tensor([1.0, 99.0]), mask=torch.tensor([True, False]))
        metrics.mean("only/rank0", 7)
        metrics.mean("weighted", 4.0, weight=torch.tensor(1.0))
    else:
        metrics.mean("kl", torch.tensor([10.0, float("inf")]), torch.tensor([True, False]))
        metrics.std("reward", torch.tensor([1000.002, 1000.003], dtype=torch.float64))
        metrics.max("gap", torch.tensor([-5.0]), mask=torch.tensor([True]))
        metrics.min("only/rank1", torch.tensor([[4.0, 3.0]]))
        metrics.mean("weighted", 8.0, weight=3)

    metrics.sum("tokens", 100 * (rank + 1))
    metrics.mean("nobody", torch.tensor([5.0]), torch.tensor([False]))
    metrics.max("nobody_max", torch.tensor([5.0]), torch.tensor([False]))
    first = metrics.reduce(World())

    return first, metrics.reduce(World())


def test_two_ranks_agree_on_the_hand_computed_numbers():
    (row, empty), other = run_ranks(2, two_ranks)
    assert (row, empty) == other
    assert empty == {}, "reduce must leave nothing behind for the next step"
    # deviations from 1000.0015 are +-0.0005 and +-0.0015
    spread = math.sqrt((2 * 0.0005**2 + 2 * 0.0015**2) / 4)
    expected = {
        "kl": 16 / 4,
        "gap": 1.0,
        "only/rank0": 7.0,
        "only/rank1": 3.0,
        "weighted": (4 + 3 * 8) / 4,
        "tokens": 300.0,
    }
    assert row == pytest.approx(expected | {"reward": spread}, rel=1e-6)


@pytest.mark.parametrize("kind", ["mean", "std"])
def test_the_split_into_calls_changes_nothing(kind):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(60, generator=generator) + 5
    weights = torch.rand(60, generator=generator)
    whole = Metrics()
    split = Metrics()
    getattr(whole, kind)("x", values, weights)
    for some in (slice(0, 1), slice(1, 1), slice(1, 7), slice(7, 60)):
        getattr(split, kind)("x", values[some], weights[some])
    expected = torch.sum(values * weights) / weights.sum()
    if kind == "std":
        expected = (torch.sum(weights * (values - expected) ** 2) / weights.sum()).sqrt()
    assert whole.reduce(One())["x"] == pytest.approx(float(expected), rel=1e-6)
    for some in (slice(0, 1), slice(1, 1), slice(1, 7), slice(7, 60)):
        getattr(whole, kind)("x", values[some], weights[some])
    assert whole.reduce(One())["x"] == pytest.approx(split.reduce(One())["x"], rel=1e-12)
    assert not whole.reduce(One())


def test_half_precision_is_summed_in_float32():
    metrics = Metrics()
    metrics.mean(
        "share", torch.ones(5000, dtype=torch.bfloat16), torch.ones(5000, dtype=torch.bool)
    )
    metrics.sum("count", torch.ones(5000, dtype=torch.bfloat16))
    metrics.sum("nothing", torch.zeros(0))
    assert metrics.reduce(One()) == {"share": 1.0, "count": 5000.0, "nothing": 0.0}


def test_a_broken_value_is_not_hidden():
    metrics = Metrics()
    metrics.max("gap", torch.tensor([1.0, math.nan]))
    metrics.mean("loss", torch.tensor([1.0, math.nan]))
    assert all(math.isnan(value) for value in metrics.reduce(One()).values())


def test_misuse_is_told():
    metrics = Metrics()
    with pytest.raises(AssertionError, match="kl"):
        metrics.mean("kl", torch.zeros(3), torch.ones(4))
    metrics.mean("kl", torch.zeros(3, requires_grad=True))
    with pytest.raises(ValueError, match="mean and cannot be a sum"):
        metrics.sum("kl", 1)


def test_accumulating_never_waits_for_the_device():
    """On the meta device nothing can be read back: any hidden `.item()` would raise."""
    metrics = Metrics()
    values = torch.zeros(8, device="meta")
    mask = torch.ones(8, dtype=torch.bool, device="meta")
    metrics.mean("mean", values, mask)
    metrics.mean("count", 3.0, mask.sum())
    metrics.std("std", values, mask)
    metrics.sum("sum", values)
    metrics.max("max", values, mask)
    metrics.min("min", values)
