"""Whole steps whose samples travel through a real TransferQueue on a real Ray cluster.

The numbers are the same as through memory. tests/test_extras.py runs this file in the environment
that has the package.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ranks import run_ranks
from runs import PPO, prepare, repeatable, rows_of, run_here

pytestmark = pytest.mark.skipif(
    find_spec("transfer_queue") is None, reason="test_extras.py runs it where TransferQueue is"
)

CASES = {"ranks with samples of their own": [], "ranks of one replica": ["--sp_size=2"]}


def store_of_two_ranks() -> dict[str, list]:
    """Return what a rank reads of rows that the other wrote, and what it may not read."""
    from lightrft.models.parallel.mesh import world_axis
    from lightrft.strategy.batching.transfer_queue import TransferQueueStore

    world = world_axis()
    alone = type(world)("alone", 1, 0, None)
    ids = torch.tensor([2 * world.rank, 2 * world.rank + 1])
    store = TransferQueueStore(world, alone, world)
    halves = torch.arange(4.0).bfloat16() + 10 * world.rank
    store.put(
        ids,
        torch.tensor([1, 3]),
        tokens={"half": halves, "mask": halves > 2},
        sequences={"group": 100 * ids},
    )
    store.rows()
    store.move([[3, 0], [1, 2]])
    found = store.get([3, 0] if world.rank == 0 else [1, 2])
    with pytest.raises(LookupError, match=f"sample {2 + world.rank} has no 'half' on this rank"):
        store.get([0, 2] if world.rank == 0 else [2, 3], ["half"])
    store.clear([3, 0] if world.rank == 0 else [1, 2])
    assert found["half"].dtype == torch.bfloat16 and found["mask"].dtype == torch.bool
    return {name: values.tolist() for name, values in found.items()}


def course(flags: list[str], folder: str) -> list[dict]:
    run_here("train_ppo", [*flags, f"--save_path={folder}"])
    return repeatable(rows_of(folder))


def both_ways(flags: list[str], folder: str) -> list[list[dict]]:
    """Return what is learned through memory, and through the queue."""
    return [
        course([*flags, f"--sample_store={store}"], f"{folder} {store}")
        for store in ("memory", "transfer_queue")
    ]


def everything(inputs: list[str], folder: Path) -> dict[str, object]:
    """Return rows of the store, and for each case what is learned in both ways."""
    found = {"store": store_of_two_ranks()}
    for case, flags in CASES.items():
        found[case] = both_ways([*inputs, *flags], f"{folder}/{case}")
    return found


@pytest.mark.slow
def test_steps_through_the_queue_are_those_through_memory(tmp_path):
    """One start serves all cases, because Ray's start takes most of the time.

    On a busy machine that start has taken two minutes, and the second rank waits for it.
    """
    inputs = [*prepare(tmp_path), *PPO, "--max_steps=1", "--init_kl_coef=0.1"]
    found = run_ranks(2, everything, inputs, tmp_path, timeout=600)
    first, second = (found[rank]["store"] for rank in (0, 1))
    assert first == {
        "half": [11, 12, 13, 0],
        "mask": [True, True, True, False],
        "group": [300, 0],
        "lengths": [3, 1],
    }

    assert second == {
        "half": [1, 2, 3, 10],
        "mask": [False, False, True, True],
        "group": [100, 200],
        "lengths": [3, 1],
    }
    for case in CASES:
        through_memory, through_queue = found[0][case]
        assert len(through_queue) == 1 and through_queue == through_memory


@pytest.mark.slow
def test_a_single_rank_can_use_the_queue_too(tmp_path):
    """It needs no store of its own, but other programs may read the samples there."""
    inputs = [*prepare(tmp_path), *PPO, "--max_steps=1", "--init_kl_coef=0.1"]
    ((through_memory, through_queue),) = run_ranks(
        1, both_ways, inputs, f"{tmp_path}/run", timeout=600
    )
    assert len(through_queue) == 1 and through_queue == through_memory
