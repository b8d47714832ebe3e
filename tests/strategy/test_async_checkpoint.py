"""A checkpoint that is written while training goes on holds what there was when it was asked
for.
"""

import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightrft.strategy import checkpoints
from lightrft.strategy.backends import offload, staging
from lightrft.strategy.checkpoint import manager
from lightrft.strategy.checkpoint.atomic import CheckpointError
from lightrft.strategy.checkpoint.zero_fragment import Fragment
from ranks import run_ranks
from strategy.test_checkpoint import Run
from strategy.training import fill_the_disk


class Gate:
    """Holds up the writing of tensors in this process until it is opened."""

    def __init__(self):
        self.opened = threading.Event()
        self.reached = threading.Event()
        write = manager._Writer.write_data

        def wait_and_write(*args):
            self.reached.set()
            assert self.opened.wait(60)
            return write(*args)

        manager._Writer.write_data = wait_and_write


def trains_meanwhile(folder: str, root: Path, args: dict):
    run = Run(folder, root, **args).steps(0, 2)
    gate = Gate()
    expected = run.state()
    run.save("two", async_save=True)
    run.steps(2, 4)
    assert (
        gate.reached.wait(60)
        and not run.strategy.finish_ckpt(wait=False)
        and not (root / "two").exists()
    )
    gate.opened.set()
    assert run.strategy.finish_ckpt() and run.strategy.finish_ckpt(wait=False)
    other = Run(folder, root, **args)
    assert other.load() == (root / "two", {"tag": "two"})
    found = other.state()

    return (
        [name for name in expected if not torch.equal(found[name], expected[name])],
        run.metrics,
        other.steps(2, 4).metrics,
    )


def uninterrupted(folder: str, root: Path, args: dict):
    return Run(folder, root, **args).steps(0, 4).metrics


@pytest.mark.slow
@pytest.mark.parametrize("args", [{}, {"tp_size": 2}])
def test_what_is_written_is_what_was_there_and_training_is_not_disturbed(folder, root, args):
    expected = run_ranks(2, uninterrupted, folder, root, args)
    for (wrong, metrics, resumed), whole in zip(
        run_ranks(2, trains_meanwhile, folder, root, args), expected, strict=True
    ):
        assert wrong == [] and metrics == whole and resumed == whole[2:]


def one_after_the_other(folder: str, root: Path):
    """The second save waits for the first; so does loading, and the end."""
    run = Run(folder, root)
    gate = Gate()
    run.save("first", async_save=True)
    threading.Timer(0.3, gate.opened.set).start()
    run.save("second", async_save=True)
    there = [(root / "first" / "manifest.json").is_file()]
    there.append(run.load()[0].name)
    gate.opened.clear()
    run.save("third", async_save=True)
    threading.Timer(0.3, gate.opened.set).start()
    run.strategy.close()

    return there + [(root / "third" / "manifest.json").is_file(), (root / "latest").read_text()]


def test_a_save_is_finished_before_the_next_one_and_before_the_end(folder, root):
    assert run_ranks(2, one_after_the_other, folder, root) == [[True, "second", True, "third"]] * 2


def waits_for_room(folder: str, root: Path):
    """Return whether a checkpoint is there when save() returns.

    The second rank sees a little more, or a little less, host memory than twice the copies.
    """
    run = Run(folder, root).steps(0, 1)
    gate = Gate()

    found = []
    # with two moments, on both ranks of the host
    copies = 3 * 4 * sum(parameter.numel() for parameter in run.model.parameters())
    for name, share in (("more", 2.1), ("less", 1.9)):
        free = share * copies if run.strategy.get_rank() == 1 else 1e12
        checkpoints.free_host_memory = lambda free=free: free
        gate.opened.clear()
        threading.Timer(0.5, gate.opened.set).start()
        run.save(name, async_save=True)
        found.append((root / name / "manifest.json").is_file())
        run.strategy.finish_ckpt()

    return found


def test_training_waits_if_a_host_has_no_room_for_copies(folder, root):
    assert run_ranks(2, waits_for_room, folder, root) == [[False, True]] * 2


def fails_on_one_rank(folder: str, root: Path):
    run = Run(folder, root)
    gate = Gate()
    run.save("good", async_save=True)
    gate.opened.set()
    run.strategy.finish_ckpt()
    if run.strategy.get_rank() == 1:
        fill_the_disk(100_000)
    run.save("bad", async_save=True)

    with pytest.raises(CheckpointError, match="bad could not be written: rank 1: OSError") as error:
        while not run.strategy.finish_ckpt(wait=False):
            pass

    fill_the_disk(-1)
    left = sorted(path.name for path in root.iterdir())
    run.save("again", async_save=True)
    run.strategy.finish_ckpt()

    return str(error.value), left, run.load()[0].name


def test_a_failure_is_raised_once_and_by_all_ranks(folder, root):
    results = run_ranks(2, fails_on_one_rank, folder, root)
    assert results[0] == results[1] and results[0][1:] == (["good", "latest"], "again")


class FakeDevice:
    """Makes every tensor one of an accelerator, and records the order of operations."""

    def __init__(self, monkeypatch):
        self.order: list[str] = []
        self.blocks: list[int] = []
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        copy = torch.Tensor.copy_
        empty = torch.empty

        def copied(target, source, non_blocking=False):
            assert non_blocking
            self.order.append("copy")
            self.pending.append((target, source))
            return target

        def pinned(size, *, pin_memory, **options):
            assert pin_memory
            self.order.append("allocate")
            self.blocks.append(size)
            return empty(size, **options)

        def synchronize(_):
            self.order.append("wait")
            # Nothing arrives before the host has waited.
            for target, source in self.pending:
                copy(target, source)

        for module in (staging, offload):
            monkeypatch.setattr(module, "is_on_device", lambda tensor: tensor.numel() > 0)
        monkeypatch.setattr(staging, "synchronize", synchronize)
        monkeypatch.setattr(staging.torch, "empty", pinned)
        monkeypatch.setattr(torch.Tensor, "copy_", copied)


def test_the_trainer_waits_once_for_copies_that_take_no_more_memory_than_the_shards(monkeypatch):
    """Blocks end within no tensor, and a tensor may be larger than a block."""
    monkeypatch.setattr(offload, "PINNED_BLOCK", 2**12)
    sizes = [3000, 700, 17, 1, 900, 250, 250, 64, 1000, 1]
    state = {
        "model": {str(n): torch.randn(size) for n, size in enumerate(sizes)},
        "optimizer": [Fragment(torch.Size([40]), 8, torch.randn(60)[10:26]), {"lr": 0.5}],
        "small": (torch.randn(6, 4).bfloat16().t(), torch.tensor(3)),
    }
    shards = [*state["model"].values(), state["optimizer"][0].values, *state["small"]]
    expected = [shard.clone() for shard in shards]
    assert staging.num_bytes(state) == sum(shard.nbytes for shard in shards)

    with monkeypatch.context() as faked:
        device = FakeDevice(faked)
        host = staging.to_host(state)
    # The next training step changes the weights.
    for shard in shards:
        shard.zero_()

    count = len(device.blocks)
    assert device.order == ["allocate"] * count + ["copy"] * len(shards) + ["wait"]
    gaps = offload.TENSOR_ALIGNMENT * len(shards)
    assert sum(device.blocks) <= staging.num_bytes(state) + gaps
    # torch allocates powers of two
    allocated = sum(1 << (size - 1).bit_length() for size in device.blocks)
    assert allocated < staging.num_bytes(state) + gaps + offload.PINNED_BLOCK
    copies = [*host["model"].values(), host["optimizer"][0].values, *host["small"]]
    assert all(torch.equal(one, other) for one, other in zip(copies, expected, strict=True))
    # So torch's writer does not copy them again.
    assert all(copy.untyped_storage().nbytes() == copy.nbytes for copy in copies)
    assert host["optimizer"][1] == {"lr": 0.5}
    assert (host["optimizer"][0].shape, host["optimizer"][0].start) == (torch.Size([40]), 8)


def shards_on_the_host():
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(14.0).view(7, 2), mesh, [Shard(0)])
    tensor.requires_grad_()
    copy = staging.to_host({"weight": tensor})["weight"]
    with torch.no_grad():
        tensor.zero_()
    kinds = copy.placements == tensor.placements and not copy.requires_grad
    return kinds, copy.full_tensor().tolist()


def test_a_shard_stays_a_shard_in_host_memory():
    expected = torch.arange(14.0).view(7, 2).tolist()
    assert run_ranks(2, shards_on_the_host) == [(True, expected)] * 2


def test_the_next_checkpoint_needs_no_room_for_the_pinned_memory_of_the_last_one(folder, root):
    assert run_ranks(1, reuses_pinned_memory, folder, root) == [[True, False]]


def reuses_pinned_memory(folder: str, root: Path):
    """Return whether there is room with and without idle pinned memory."""
    run = Run(folder, root)
    checkpoints.free_host_memory = lambda: 2_000
    found = []
    for idle in (9_000, 8_999):
        checkpoints.idle_pinned_memory = lambda _, idle=idle: idle
        found.append(run.strategy.checkpoints._has_room(10_000))
    return found
