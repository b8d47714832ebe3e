"""Offload idle models and optimizers to host memory.

Offloaded tensors are on the meta device or have an empty storage, on every kind of hardware, so
tests on a CPU hold for accelerators too. Parameters stay the same objects, and reloaded values are
bit-identical.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightrft.models.parallel.device import local_tensor, release_cached_memory, synchronize

PINNED_BLOCK = 2**28
"""Bytes of a buffer in host memory. torch rounds each pinned allocation up to a power of two, so a
few equal buffers waste less than one large one."""
TENSOR_ALIGNMENT = 64
"""Bytes; each tensor in a block begins at a multiple of this."""


class Offloaded(Protocol):
    """A model or an optimizer in host memory, where using it raises an error."""

    def reload(self, device: torch.device) -> None:
        """Move it back to the device, bit-identical."""


class HostCopies:
    """Copies of tensors in host memory, which are complete once the device is synchronised."""

    def __init__(self, tensors: Iterable[Tensor]):
        sources = [tensor.detach() for tensor in tensors]
        self.copies = host_like(sources)
        for copy, source in zip(self.copies, sources, strict=True):
            copy.copy_(source, non_blocking=True)

    def load(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values into tensors of the same shapes and types, in the same order."""
        for target, copy in zip(tensors, self.copies, strict=True):
            target.detach().copy_(copy, non_blocking=True)


def host_like(tensors: list[Tensor]) -> list[Tensor]:
    """Return contiguous tensors of the same shapes and types in a few blocks of host memory.

    The blocks are pinned for tensors of an accelerator. torch rounds each pinned allocation up to a
    power of two. So the largest tensors come first, each into the first block with room, and the
    small ones fill what is left of the blocks.
    """
    rooms: list[int] = []
    used: list[int] = []
    places = [(0, 0)] * len(tensors)
    for index in sorted(range(len(tensors)), key=lambda index: -tensors[index].nbytes):
        size = -(-tensors[index].nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        block = next((b for b, room in enumerate(rooms) if used[b] + size <= room), len(rooms))
        if block == len(rooms):
            rooms.append(max(PINNED_BLOCK, 1 << (size - 1).bit_length()))
            used.append(0)
        places[index] = block, used[block]
        used[block] += size

    # A tensor over a slice of a numpy array has a storage of its own size. torch's writer copies
    # every view of a larger storage once more.
    pinned = any(map(is_on_device, tensors))
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned).numpy() for size in used]
    return [
        torch.from_numpy(blocks[block][at : at + tensor.nbytes])
        .view(tensor.dtype)
        .view(tensor.shape)
        for tensor, (block, at) in zip(tensors, places, strict=True)
    ]


def is_on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" and tensor.numel() > 0


class OffloadedTensors:
    """Offloaded tensors with emptied storages.

    All views of a storage come back with it, also views that a library holds.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        device: torch.device,
        guards: list[RemovableHandle],
        scratch: Iterable[Tensor] = (),
    ):
        """Offload `tensors`; the values in `scratch` are discarded."""
        self.guards = guards
        copied = _with_storage(tensors)
        dropped = _with_storage(scratch)
        # Views share storages, and a storage must be copied and emptied only once.
        storages = {_address(tensor): tensor.untyped_storage() for tensor in (*copied, *dropped)}
        self.sizes = {key: storage.nbytes() for key, storage in storages.items()}

        self.kept_keys = list(dict.fromkeys(map(_address, copied)))
        self.copies = HostCopies(_pieces(storages[key] for key in self.kept_keys))
        self.views = [(each, _address(each), _geometry(each)) for each in (*copied, *dropped)]
        synchronize(device)
        for tensor, _, _ in self.views:
            tensor.data = tensor.data.new_empty(0)
        # A storage in shared memory cannot be resized: it is freed with its last view, and reload()
        # allocates a new one.
        self.emptied = {key: storage for key, storage in storages.items() if storage.resizable()}
        for storage in self.emptied.values():
            storage.resize_(0)
        release_cached_memory(device)

    def reload(self, device: torch.device) -> None:
        for guard in self.guards:
            guard.remove()
        # A storage that could not be emptied is gone, and gets a new one.
        storages = {
            key: self.emptied.get(key, torch.UntypedStorage(0, device=device)) for key in self.sizes
        }
        for key, storage in storages.items():
            storage.resize_(self.sizes[key])
        self.copies.load(_pieces(storages[key] for key in self.kept_keys))

        for tensor, key, geometry in self.views:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=storages[key].device).set_(
                storages[key], *geometry
            )

        synchronize(device)


class OffloadedModel:
    """FSDP2 model whose parameters and buffers are in host memory."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.model = model
        self.guards = guard_model(model)
        self.copies = HostCopies(_tensors(model))
        synchronize(device)
        storages = [local_tensor(parameter).untyped_storage() for parameter in model.parameters()]
        with same_parameters():
            model.to_empty(device="meta")

        # FSDP holds references to the old shards, so dropping ours frees nothing
        for storage in filter(torch.UntypedStorage.resizable, storages):
            storage.resize_(0)

        release_cached_memory(device)

    def reload(self, device: torch.device) -> None:
        for guard in self.guards:
            guard.remove()
        with same_parameters():
            self.model.to_empty(device=device)
        with torch.no_grad():
            self.copies.load(_tensors(self.model))
        synchronize(device)


class OffloadedOptimizer:
    """Optimizer whose state is in host memory; 0-dim tensors (step counts) are not moved."""

    def __init__(self, optimizer: Optimizer, device: torch.device):
        self.guards = guard_optimizer(optimizer)
        self.states = [
            (state, name)
            for state in optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor) and value.ndim > 0
        ]
        self.copies = HostCopies(local_tensor(state[name]) for state, name in self.states)
        synchronize(device)
        for state, name in self.states:
            state[name] = torch.empty_like(state[name], device="meta")
        release_cached_memory(device)

    def reload(self, device: torch.device) -> None:
        for guard in self.guards:
            guard.remove()
        for state, name in self.states:
            state[name] = torch.empty_like(state[name], device=device)
        self.copies.load(local_tensor(state[name]) for state, name in self.states)
        synchronize(device)


@contextmanager
def same_parameters() -> Iterator[None]:
    """Keep the parameters of a module that is moved inside the same objects, and tied ones tied.

    DTensors always behave like that.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def guard_model(model: nn.Module) -> list[RemovableHandle]:
    """Make any use of the model raise an error with the remedy, until the handles are removed."""
    refuse = partial(_refuse, is_offloaded(model))
    return [
        model.register_forward_pre_hook(refuse, prepend=True),
        model.register_state_dict_pre_hook(refuse),
    ]


def guard_optimizer(optimizer: Optimizer) -> list[RemovableHandle]:
    refuse = partial(_refuse, is_offloaded(optimizer))
    return [
        optimizer.register_step_pre_hook(refuse),
        optimizer.register_state_dict_pre_hook(refuse),
        optimizer.register_load_state_dict_pre_hook(refuse),
    ]


def is_offloaded(item: nn.Module | Optimizer) -> str:
    """Return the error message for using an offloaded item."""
    way_back = "reload_model()" if isinstance(item, nn.Module) else "maybe_load_optimizer()"
    return f"{_name(item)} is offloaded: call {way_back} before it is used"


def has_gradients(model: nn.Module) -> str:
    """Return the error message for offloading a model that has gradients."""
    return f"{_name(model)} has gradients that would be lost: finish or abort the train step first"


def _refuse(why: str, *_: Any) -> NoReturn:
    raise RuntimeError(why)


def _name(item: nn.Module | Optimizer) -> str:
    return type(item).__name__.removeprefix("FSDP")  # fully_shard adds this prefix


def _with_storage(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.untyped_storage().nbytes()]


def _pieces(storages: Iterable[torch.UntypedStorage]) -> Iterator[Tensor]:
    """Yield the bytes of storages in pieces that fill blocks, as some are many times as large."""
    for storage in storages:
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        yield from whole.split(PINNED_BLOCK // 16)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _geometry(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield this rank's shards of all parameters and buffers; shared ones come once.

    Non-persistent buffers are included.
    """
    return map(local_tensor, (*model.parameters(), *model.buffers()))
