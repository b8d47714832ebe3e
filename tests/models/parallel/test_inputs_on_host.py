"""Inputs of recomputed blocks are in host memory, and copies run beside the blocks.

A device is simulated: a clock for each of its streams says when what it was given would end.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, LlamaConfig

from flat_models import TEMPERATURE, gradients_of, make_batch, make_model
from lightrft.core.batch import Batch
from lightrft.models.attention.flat import ATTENTION
from lightrft.models.heads import Actor
from lightrft.models.parallel.device import _side_stream
from lightrft.models.parallel.recompute import recompute
from memory import Storages

LAYERS = 6
FORWARD = 10.0
"""Time of a block's forward pass; the backward pass takes twice as long."""
HIDDEN = 64
INPUT = 2 * 64 * HIDDEN
"""Bytes of the input of a block: 64 tokens in bfloat16."""


@dataclass
class Stream:
    """Stream of the simulated device: work begins when all before it has ended."""

    device: "Simulation"
    end: float = 0.0

    def work(self, duration: float) -> tuple[float, float]:
        """Take work; return when it begins and ends."""
        begin, self.end = self.end, self.end + duration
        return begin, self.end

    def wait_stream(self, other: "Stream") -> None:
        self.end = max(self.end, other.end)

    def record_event(self) -> float:
        return self.end

    def wait_event(self, event: float) -> None:
        self.device.waited.add(event)
        self.end = max(self.end, event)

    def __enter__(self) -> None:
        self.device.streams.append(self)

    def __exit__(self, *_: object) -> None:
        self.device.streams.pop()


@dataclass
class Simulation:
    """Device with a main stream and others, and what they did."""

    copying: float
    """Time of a copy."""
    streams: list[Stream] = field(default_factory=list)
    blocks: list[tuple[str, float, float]] = field(default_factory=list)
    copies: list[tuple[str, float, float]] = field(default_factory=list)
    """Where to, begin and end."""
    waited: set[float] = field(default_factory=set)
    """Ends of copies that the main stream has waited for."""
    used: list[tuple[StorageWeakRef, float]] = field(default_factory=list)
    """Memory of the device that is copied, and when the copy ends."""
    recorded: list[Tensor] = field(default_factory=list)
    """What has recorded a stream: this host never sees that anything has ended."""

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if target.device != source.device:
            assert non_blocking, "the host would wait"
            self.copies.append((target.device.type, *self.streams[-1].work(self.copying)))
            on_device = source if target.device.type == "cpu" else target
            self.used.append((StorageWeakRef(on_device.untyped_storage()), self.copies[-1][2]))
        self.check_free_memory()
        return target

    def check_free_memory(self) -> None:
        """Require that no memory is free which the main stream has not waited for."""
        assert all(end in self.waited for storage, end in self.used if storage.expired())

    def compute(self, name: str, duration: float) -> None:
        self.check_free_memory()
        self.blocks.append((name, *self.streams[-1].work(duration)))


@contextmanager
def simulated(copying: float) -> Iterator[Simulation]:
    device = Simulation(copying)
    device.streams.append(Stream(device))
    _side_stream.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Stream", lambda _: Stream(device))
        patch.setattr(torch.accelerator, "current_stream", lambda _: device.streams[-1])
        patch.setattr(Tensor, "record_stream", lambda tensor, _: device.recorded.append(tensor))
        patch.setattr(Tensor, "copy_", lambda *args, **options: device.copy(*args, **options))
        yield device
    _side_stream.cache_clear()


def actor_of(layers: int) -> Actor:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        num_hidden_layers=layers,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    actor = Actor(model.to("meta", torch.bfloat16)).train()
    recompute(actor, "offload")
    return actor


def batch() -> Batch:
    return make_batch([16] * 4).to("meta")


def timeline(copying: float) -> tuple[Simulation, float]:
    """Compute one batch forward and backward; return the device, and when everything has ended."""
    actor = actor_of(LAYERS)
    with simulated(copying) as device:

        def before(number: int):
            return lambda *_: device.compute(f"forward {number}", FORWARD)

        def after(number: int):
            def backward(_: Tensor) -> None:
                device.compute(f"backward {number}", 2 * FORWARD)

            return lambda _, __, output: output.register_hook(backward) and None

        for number, block in enumerate(actor.hf_model.get_decoder().layers):
            block.register_forward_pre_hook(before(number))
            block.register_forward_hook(after(number))
        logprobs, _ = actor(batch(), TEMPERATURE)
        logprobs.sum().backward()
        return device, device.streams[0].end


def test_copies_run_beside_the_blocks() -> None:
    """All blocks take as long as without copies, and each copy is beside the expected block."""
    device, end = timeline(0.9 * FORWARD)
    assert end == LAYERS * 4 * FORWARD
    leaving = [copy[1:] for copy in device.copies if copy[0] == "cpu"]
    arriving = [copy[1:] for copy in device.copies if copy[0] == "meta"]
    times = {}
    for name, begin, stop in device.blocks:
        times.setdefault(name, []).append((begin, stop))

    for number, (begin, stop) in enumerate(leaving):
        assert times[f"forward {number}"][0][0] <= begin < stop <= times[f"forward {number}"][0][1]
    # The last input is still there. The one before a block comes while this block is recomputed.
    assert len(leaving) == LAYERS and len(arriving) == LAYERS - 1
    for number, (begin, stop) in zip(reversed(range(LAYERS - 1)), arriving, strict=True):
        recomputed = times[f"forward {number + 1}"][1]
        assert recomputed[0] <= begin and stop <= times[f"forward {number}"][1][0]


def test_a_block_waits_for_a_slow_copy() -> None:
    """Otherwise it would read what has not arrived, or ever more inputs would be on the device."""
    copying = 5 * FORWARD
    device, end = timeline(copying)
    assert end > (LAYERS - 1) * 2 * copying
    ends = [stop for kind, _, stop in device.copies if kind == "meta"]
    recomputed = [begin for name, begin, _ in device.blocks if name.startswith("forward")][LAYERS:]
    assert all(begin >= stop for begin, stop in zip(recomputed[1:], ends, strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_the_device_waits_for_copies_of_a_graph_that_is_dropped(fails: bool) -> None:
    """The copy of the last input may run then, or if a block fails that of the one before it."""

    def fail(*_: object) -> None:
        raise MemoryError

    actor = actor_of(LAYERS)
    with simulated(5 * FORWARD) as device:
        outputs = actor(batch(), TEMPERATURE)
        if fails:
            actor.hf_model.get_decoder().layers[-2].register_forward_pre_hook(fail)
            with pytest.raises(MemoryError):
                outputs[0].sum().backward()
        assert len(device.waited) == len(device.copies) - 1
        del outputs
        gc.collect()
        assert all(storage.expired() for storage, _ in device.used)
        device.check_free_memory()


def test_inputs_of_frozen_blocks_are_not_copied() -> None:
    """As in a frozen tower, nothing before the last two blocks has a gradient."""
    actor = actor_of(LAYERS)
    decoder = actor.hf_model.get_decoder()
    for part in (decoder.embed_tokens, *decoder.layers[:-2]):
        part.requires_grad_(False)
    with simulated(1.0) as device:
        actor(batch(), TEMPERATURE)[0].sum().backward()
    assert len(device.copies) == 2 + 1
    assert all(parameter.grad is not None for parameter in decoder.layers[-2:].parameters())


def gradients(policy: str) -> dict[str, Tensor]:
    """Return the gradients of four batches on the accelerator, where free memory is overwritten."""
    device = torch.device(torch.accelerator.current_accelerator())
    actor = Actor(make_model("llama", ATTENTION).to(device, torch.bfloat16)).train()
    recompute(actor, policy)
    for block in actor.hf_model.get_decoder().layers:
        block.register_forward_hook(
            lambda _, __, output: [torch.full_like(output, 7.0) for _ in range(4)] and None
        )
    for _ in range(4):
        logprobs, _ = actor(make_batch([16] * 4).to(device), TEMPERATURE)
        logprobs.sum().backward()
    return gradients_of(actor)


@pytest.mark.gpu
def test_gradients_on_a_device_are_those_of_full_recomputation() -> None:
    found, expected = gradients("offload"), gradients("full")
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def bytes_after_forward(layers: int, device: str) -> int:
    actor = actor_of(layers)
    with (
        simulated(1.0),
        Storages([*actor.parameters(), *actor.buffers()], device=device) as storages,
    ):
        logprobs, _ = actor(batch(), TEMPERATURE)
    kept = storages.kept()
    del logprobs
    return kept


def test_inputs_of_blocks_take_host_memory_and_none_of_the_device() -> None:
    more = {
        device: bytes_after_forward(4, device) - bytes_after_forward(3, device)
        for device in ("cpu", "meta")
    }
    assert more["meta"] == 0
    assert INPUT <= more["cpu"] < INPUT + 10_000, "with the state of random numbers"


def test_host_memory_is_free_after_the_backward_pass() -> None:
    actor = actor_of(3)
    with simulated(1.0), Storages(device="cpu") as storages:
        before = storages.kept()
        for _ in range(3):
            logprobs, _ = actor(batch(), TEMPERATURE)
            logprobs.sum().backward()
            del logprobs
    assert storages.kept() - before < INPUT
