"""Models and optimizers that nobody needs now: their tensors wait in host memory.

What is offloaded is on the meta device or has an empty storage, on every kind of hardware, so a CPU proves what holds on an
accelerator. Parameters stay the same objects, and what comes back is the same bit by bit.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightrft.parallel.device import release_cached_memory, synchronize


class OffloadedTensors:
    """Tensors whose storages are emptied: whatever else views them comes back with them, also what a library keeps to itself."""

    def __init__(
        self, tensors: Iterable[Tensor], device: torch.device, guards: list[RemovableHandle], scratch: Iterable[Tensor] = ()
    ):
        """What is in `scratch` matters to nobody, and is not kept."""
        self.guards = guards
        kept, dropped = _with_storage(tensors), _with_storage(scratch)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in (*kept, *dropped)}
        self.sizes = {key: storage.nbytes() for key, storage in storages.items()}
        self.host = {key: _to_host(_bytes(storages[key])) for key in {tensor.untyped_storage().data_ptr() for tensor in kept}}
        self.views = [(tensor, tensor.untyped_storage().data_ptr(), _geometry(tensor)) for tensor in (*kept, *dropped)]
        synchronize(device)
        for tensor, _, _ in self.views:
            tensor.data = tensor.data.new_empty(0)
        # A file in memory has no other size: it goes with its last view, and the copy takes its place.
        self.emptied = {key: storage for key, storage in storages.items() if storage.resizable()}
        for storage in self.emptied.values():
            storage.resize_(0)
        release_cached_memory(device)

    def reload(self, device: torch.device) -> None:
        for guard in self.guards:
            guard.remove()
        storages = {key: self.emptied.get(key, torch.UntypedStorage(0, device=device)) for key in self.sizes}
        for key, storage in storages.items():
            storage.resize_(self.sizes[key])
            if key in self.host:
                _bytes(storage).copy_(self.host[key], non_blocking=True)
        for tensor, key, geometry in self.views:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=storages[key].device).set_(storages[key], *geometry)
        synchronize(device)


class OffloadedModel:
    """An FSDP2 model whose parameters and buffers are in host memory."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.model = model
        self.guards = guard_model(model)
        self.kept = {name: _to_host(tensor) for name, tensor in _tensors(model)}
        synchronize(device)
        storages = [_local(parameter).untyped_storage() for parameter in model.parameters()]
        with same_parameters():
            model.to("meta")
        for storage in storages:  # FSDP keeps references of its own to the old shards, so letting go of ours frees nothing
            if storage.resizable():
                storage.resize_(0)
        release_cached_memory(device)

    def reload(self, device: torch.device) -> None:
        for guard in self.guards:
            guard.remove()
        with same_parameters():
            self.model.to_empty(device=device)
        with torch.no_grad():
            for name, tensor in _tensors(self.model):
                tensor.copy_(self.kept[name], non_blocking=True)
        synchronize(device)


class OffloadedOptimizer:
    """An optimizer whose state is in host memory; numbers of no dim (step counts) stay where they are."""

    def __init__(self, optimizer: Optimizer, device: torch.device):
        self.guards = guard_optimizer(optimizer)
        states = [(state, name) for state in optimizer.state.values() for name, value in state.items() if _is_large(value)]
        self.kept = [(state, name, _to_host(_local(state[name]))) for state, name in states]
        synchronize(device)
        for state, name in states:
            state[name] = torch.empty_like(state[name], device="meta")
        release_cached_memory(device)

    def reload(self, device: torch.device) -> None:
        for guard in self.guards:
            guard.remove()
        for state, name, kept in self.kept:
            state[name] = torch.empty_like(state[name], device=device)
            _local(state[name]).copy_(kept, non_blocking=True)
        synchronize(device)


@contextmanager
def same_parameters() -> Iterator[None]:
    """Inside, parameters of a module that moves stay the same objects, tied ones tied, as DTensors always do."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def guard_model(model: nn.Module) -> list[RemovableHandle]:
    """Until the handles are removed, using the model is an error that says what to do."""
    refuse = partial(_refuse, is_offloaded(model))
    return [model.register_forward_pre_hook(refuse, prepend=True), model.register_state_dict_pre_hook(refuse)]


def guard_optimizer(optimizer: Optimizer) -> list[RemovableHandle]:
    refuse = partial(_refuse, is_offloaded(optimizer))
    return [
        optimizer.register_step_pre_hook(refuse),
        optimizer.register_state_dict_pre_hook(refuse),
        optimizer.register_load_state_dict_pre_hook(refuse),
    ]


def is_offloaded(item: nn.Module | Optimizer) -> str:
    """Why something cannot be used."""
    way_back = "reload_model()" if isinstance(item, nn.Module) else "maybe_load_optimizer()"
    return f"{_name(item)} is offloaded: call {way_back} before it is used"


def has_gradients(model: nn.Module) -> str:
    """Why a model cannot leave."""
    return f"{_name(model)} has gradients, which would be lost: finish or abort its train step first"


def _refuse(why: str, *_: Any) -> NoReturn:
    raise RuntimeError(why)


def _name(item: nn.Module | Optimizer) -> str:
    return type(item).__name__.removeprefix("FSDP")  # which fully_shard puts before it


def _with_storage(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.untyped_storage().nbytes()]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _geometry(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, this rank's part) of parameters and all buffers, also those outside the checkpoint; shared ones once."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, _local(tensor)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned where there is an accelerator; complete after the device is synchronised."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type != "cpu")
    return host.copy_(tensor.detach(), non_blocking=True)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
