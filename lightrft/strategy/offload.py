"""Models and optimizers that nobody needs now: their tensors wait in host memory.

What is away is on the meta device, on every kind of hardware, so a CPU proves what holds on an accelerator. Parameters
stay the same objects, and what comes back is the same bit by bit.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightrft.parallel.device import release_cached_memory, synchronize


class AwayModel:
    """A sharded model whose parameters and buffers are in host memory. Its gradients must be gone before."""

    def __init__(self, model: nn.Module, device: torch.device):
        if any(parameter.grad is not None for parameter in model.parameters()):
            raise RuntimeError(has_gradients(model))
        self.model = model
        self.kept = {name: _to_host(tensor) for name, tensor in _tensors(model)}
        synchronize(device)
        storages = [_local(parameter).untyped_storage() for parameter in model.parameters()]
        model.to("meta")
        for storage in storages:  # FSDP keeps references of its own to the old shards, so letting go of ours frees nothing
            if storage.resizable():
                storage.resize_(0)
        release_cached_memory(device)
        self.guards = [
            model.register_forward_pre_hook(self._refuse, prepend=True),
            model.register_state_dict_pre_hook(self._refuse),
        ]

    def reload(self, device: torch.device) -> None:
        for guard in self.guards:
            guard.remove()
        self.model.to_empty(device=device)
        with torch.no_grad():
            for name, tensor in _tensors(self.model):
                tensor.copy_(self.kept[name], non_blocking=True)
        synchronize(device)

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(f"{_name(self.model)} is offloaded: call reload_model() before it is used")


class AwayOptimizer:
    """An optimizer whose state is in host memory; numbers of no dim (step counts) stay where they are."""

    def __init__(self, optimizer: Optimizer, device: torch.device):
        self.optimizer = optimizer
        states = [(state, name) for state in optimizer.state.values() for name, value in state.items() if _is_large(value)]
        self.kept = [(state, name, _to_host(_local(state[name]))) for state, name in states]
        synchronize(device)
        for state, name in states:
            state[name] = torch.empty_like(state[name], device="meta")
        release_cached_memory(device)
        self.guards = [
            optimizer.register_step_pre_hook(self._refuse),
            optimizer.register_state_dict_pre_hook(self._refuse),
            optimizer.register_load_state_dict_pre_hook(self._refuse),
        ]

    def reload(self, device: torch.device) -> None:
        for guard in self.guards:
            guard.remove()
        for state, name, kept in self.kept:
            state[name] = torch.empty_like(state[name], device=device)
            _local(state[name]).copy_(kept, non_blocking=True)
        synchronize(device)

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(f"{type(self.optimizer).__name__} is offloaded: call maybe_load_optimizer() before it is used")


def has_gradients(model: nn.Module) -> str:
    """Why a model cannot leave."""
    return f"{_name(model)} has gradients, which would be lost: finish or abort its train step first"


def _name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")  # which fully_shard puts before it


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
