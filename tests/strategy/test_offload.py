"""Offloaded is away: no device memory, no silent use, and back bit by bit."""

import os

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightrft.models.parallel.device import host_cores, memory_in_use
from lightrft.strategy import FSDPStrategy
from lightrft.strategy.backends import offload
from ranks import run_cases, run_ranks
from strategy.training import load, one_step, snapshot, strategy


def local_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    return [getattr(tensor, "_local_tensor", tensor) for tensor in (*model.parameters(), *states)]


def cycle(made: FSDPStrategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Away and back, twice, in both orders; twice in a row changes nothing."""
    for _ in range(2):
        made.offload_model(model)
        made.offload_model(model)
        made.maybe_offload_optimizer(optimizer)
        made.maybe_load_optimizer(optimizer)
        made.maybe_offload_optimizer(optimizer)
        made.reload_model(model)
        made.reload_model(model)
        made.maybe_load_optimizer(optimizer)


def course(folder: str, args: dict, cycles: bool):
    """Losses and norms of four steps, and everything that is kept after them."""
    made = strategy(**args)
    model = load(folder).train()
    optimizer = made.create_optimizer(model, lr=1e-2, weight_decay=0.1)
    scheduler = made.create_scheduler(optimizer, "cosine", 2, 8)
    made.prepare((model, optimizer, scheduler))
    before = list(map(id, model.parameters()))

    numbers = []
    for step in range(4):
        if cycles:
            cycle(made, model, optimizer)
        numbers.append(one_step(made, model, optimizer, step, num_micro=2, scheduler=scheduler)[:2])

    assert list(map(id, model.parameters())) == before
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    moments = [tensor.clone() for tensor in local_tensors(model, optimizer)]

    return numbers, snapshot(made, model), buffers, moments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "args"), [(1, {}), (2, {"bf16": True}), (2, {"dp_replicate": 2})], ids=str
)
def test_training_with_cycles_in_between_is_bit_identical(folder, tied_folder, world_size, args):
    for path in (folder, tied_folder):
        results = run_cases(
            world_size, course, {cycles: (path, args, cycles) for cycles in (True, False)}
        )
        assert_identical(results[True], results[False])


def assert_identical(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def prepared(folder: str, **args):
    made = strategy(**args)
    model = load(folder)
    optimizer = made.create_optimizer(model, lr=1e-2)
    made.prepare((model, optimizer))
    one_step(made, model, optimizer, 0)
    return made, model, optimizer


def where_it_is(folder: str):
    made, model, optimizer = prepared(folder)
    storages = [tensor.untyped_storage() for tensor in local_tensors(model, optimizer)]
    parameters = list(model.parameters())
    held = len(parameters), sum(storage.nbytes() for storage in storages[: len(parameters)])
    shared_with_fsdp = storages[: len(parameters)]
    made.offload_model(model)
    made.maybe_offload_optimizer(optimizer)
    tensors = [*model.parameters(), *model.buffers(), *local_tensors(model, optimizer)]
    devices = {tensor.device.type for tensor in tensors}
    left = sum(storage.nbytes() for storage in shared_with_fsdp)
    made.reload_model(model)
    made.maybe_load_optimizer(optimizer)
    tensors = [*model.parameters(), *model.buffers(), *local_tensors(model, optimizer)]

    return held, devices, left, {tensor.device.type for tensor in tensors}


def test_memory_is_released(folder):
    """The storage of the old shards must be empty.

    FSDP keeps the shards alive, so the device alone would say nothing.
    """
    for (count, held), devices, left, after in run_ranks(2, where_it_is, folder):
        assert count > 20 and held > 10_000
        assert devices == {"meta"} and left == 0
        assert after == {"cpu"}


def misuse(folder: str):
    made, model, optimizer = prepared(folder)
    made.offload_model(model)
    made.maybe_offload_optimizer(optimizer)

    errors = []
    for use in (
        lambda: model(input_ids=torch.zeros(1, 3, dtype=torch.int64)),
        lambda: model.state_dict(),
        lambda: made.optimizer_step(optimizer, model),
        lambda: optimizer.state_dict(),
    ):
        with pytest.raises(RuntimeError) as caught:
            use()
        errors.append(str(caught.value))

    streamed = {tensor.device.type for _, tensor in made.full_params(model)}
    made.maybe_load_optimizer(optimizer)
    one_step(made, model, optimizer, 1)  # usable again

    return errors, streamed


def test_use_while_away_names_the_way_back(folder):
    model = "Qwen3ForCausalLM is offloaded: call reload_model() before it is used"
    optimizer = "AdamW is offloaded: call maybe_load_optimizer() before it is used"
    assert run_ranks(2, misuse, folder) == [([model, model, optimizer, optimizer], {"cpu"})] * 2


def checkpoint_while_away(folder: str, root: str):
    made, model, optimizer = prepared(folder)
    expected = snapshot(made, model)
    made.offload_model(model)
    made.maybe_offload_optimizer(optimizer)
    made.save_ckpt(model, root, "away", optimizer=optimizer)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    made.reload_model(model)
    made.maybe_load_optimizer(optimizer)
    one_step(made, model, optimizer, 1)
    made.offload_model(model)
    made.maybe_offload_optimizer(optimizer)
    made.load_ckpt(model, root, optimizer=optimizer)

    return snapshot(made, model), expected


def test_a_checkpoint_borrows_what_is_away(folder, root):
    for found, expected in run_ranks(2, checkpoint_while_away, folder, str(root)):
        assert_identical(found, expected)


def with_host_parameters(folder: str):
    made, model, optimizer = prepared(folder, fsdp_cpu_offload=True)
    made.offload_model(model)
    made.maybe_offload_optimizer(optimizer)
    return {parameter.device.type for parameter in model.parameters()}, one_step(
        made, model, optimizer, 1
    )[0] > 0


def test_what_lives_in_host_memory_stays(folder):
    assert run_ranks(1, with_host_parameters, folder) == [({"cpu"}, True)]


def test_two_flags_for_the_same_memory():
    made = FSDPStrategy(args={"fsdp": True, "offload_idle": True, "fsdp_cpu_offload": True})
    with pytest.raises(
        ValueError, match="--offload_idle with --fsdp_cpu_offload, which leaves nothing to move"
    ):
        made.setup_distributed()


@pytest.mark.parametrize(("bound_to", "threads"), [(12, 3), (6, 3), (2, 2)])
def test_a_step_in_host_memory_has_the_ranks_share_of_the_cores(monkeypatch, bound_to, threads):
    """The launcher has 12 cores for four ranks, and may have bound each of them to a part."""
    cores = {0: bound_to, os.getppid(): 12}
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores[process])))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    before = torch.get_num_threads()
    with host_cores():
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == before


def away_and_back(dtype_args: dict) -> tuple[float, list[str]]:
    """Return (share of the memory that stays, names of tensors that came back with other bits).

    Model and optimizer are away, in this process, and the memory that they had is overwritten
    meanwhile.
    """
    made = strategy(**dtype_args)
    # libraries of matrix products keep memory for themselves from the first on
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(64, 64, device=made.device, dtype=dtype, requires_grad=True)
        (square @ square).sum().backward()

    del square
    before = memory_in_use(made.device)
    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=4000,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = made.create_optimizer(model, lr=1e-2)
    made.prepare((model, optimizer))
    ids = torch.arange(32, device=made.device)[None]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    made.backward(loss, model, optimizer)
    made.optimizer_step(optimizer, model)
    del loss, ids
    everything = lambda: dict(enumerate([*local_tensors(model, optimizer), *model.buffers()]))  # noqa: E731
    known = {name: tensor.detach().cpu().clone() for name, tensor in everything().items()}
    held = memory_in_use(made.device) - before

    left = 0
    for _ in range(2):
        made.offload_model(model)
        made.maybe_offload_optimizer(optimizer)
        left = max(left, memory_in_use(made.device) - before)
        for tensor in known.values():
            torch.full_like(tensor, 7, device=made.device)
        made.reload_model(model)
        made.maybe_load_optimizer(optimizer)

    changed = [
        str(name)
        for name, tensor in everything().items()
        if not torch.equal(tensor.detach().cpu(), known[name])
    ]
    made.close()
    return left / max(held, 1), changed


def test_copies_in_host_memory_have_the_same_bits(monkeypatch):
    """There are tensors of several types and strides, with no element and with one.

    There are also tensors that are larger than a buffer.
    """
    monkeypatch.setattr(offload, "PINNED_BLOCK", 64)
    tensors = [
        torch.randn(3, 7),
        torch.randn(5, 4).t(),
        torch.tensor(2.5),
        torch.randn(0, 3),
        torch.rand(9) > 0.5,
        torch.randn(31).bfloat16(),
        torch.arange(6),
        torch.tensor([float("nan"), -0.0]),
    ]
    expected = [tensor.clone() for tensor in tensors]
    copies = offload.HostCopies(tensors)
    targets = [torch.empty_like(tensor) for tensor in tensors]
    assert [target.stride() for target in targets] == [tensor.stride() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    copies.load(targets)
    for target, tensor in zip(targets, expected, strict=True):
        assert torch.equal(bits(target), bits(tensor))


def test_storages_take_no_more_than_their_bytes_in_host_memory(monkeypatch):
    """ZeRO's flat partitions are larger than a buffer. torch allocates powers of two."""
    monkeypatch.setattr(offload, "PINNED_BLOCK", 2**12)
    blocks: list[int] = []
    empty = torch.empty

    def recorded(*size: int, **options) -> torch.Tensor:
        blocks.extend(size if "pin_memory" in options else ())
        return empty(*size, **options)

    flat = [torch.randn(size) for size in (4300, 4300, 4300, *[600] * 8, 33, 1)]
    views = [flat[0][:4000].view(40, 100), flat[0][4000:], *flat[1:]]
    expected = [view.clone() for view in views]
    num_bytes = sum(each.nbytes for each in flat)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", recorded)
        offloaded = offload.OffloadedTensors([*views, flat[0]], torch.device("cpu"), [])

    assert all(view.numel() == 0 for view in views)
    assert sum(1 << (size - 1).bit_length() for size in blocks) < num_bytes + offload.PINNED_BLOCK
    offloaded.reload(torch.device("cpu"))
    assert all(map(torch.equal, views, expected))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.slow
def test_what_was_overwritten_comes_back_bit_by_bit():
    ((_, changed),) = run_ranks(1, away_and_back, {"bf16": True})
    assert changed == []


@pytest.mark.gpu
@pytest.mark.parametrize("args", [{}, {"bf16": True}], ids=str)
def test_an_accelerator_is_emptied_and_gets_the_same_bits_back(args):
    left, changed = away_and_back(args)
    assert changed == [] and left < 0.01
