"""Activation checkpointing: activations are recomputed in the backward pass instead of stored.

A block keeps its input, on the device or in host memory, and what it must not compute twice.
"""

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightrft.models.outermost import outermost
from lightrft.models.parallel.device import begin_copy

KEPT = "kept, "
"""Beginning of the name of an attention that selective recomputation keeps, before its own name."""


def recompute(module: nn.Module, policy: str) -> None:
    """Enable activation checkpointing for the blocks of every transformers model inside `module`.

    A block keeps only its input. With the policy `selective` it also keeps attention and what its
    backward pass needs, and with `offload` the input is in host memory.
    """
    options = {"use_reentrant": False, "context_fn": _passes}
    for model in outermost(module, PreTrainedModel):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        # Otherwise gradients of the inputs of frozen towers would be computed.
        model.disable_input_require_grads()
        if policy == "offload":
            on_host = partial(_with_inputs_on_host, partial(checkpoint, **options))
            model._set_gradient_checkpointing(gradient_checkpointing_func=on_host)
        text = model.config.get_text_config()
        kept = f"{KEPT}{text._attn_implementation}"
        if policy == "selective" and kept in ALL_ATTENTION_FUNCTIONS:
            text._attn_implementation = {"": kept}


@dataclass
class _Pass:
    """While entered, a block computes for the first time, or again.

    The first pass writes its results to a list, and each later one reads them from its beginning.
    """

    results: list[Any]
    again: bool

    def __enter__(self) -> None:
        self.unread = iter(self.results)
        self.outer = _current.set(self)

    def __exit__(self, *_: Any) -> None:
        _current.reset(self.outer)


_current: ContextVar[_Pass | None] = ContextVar("pass", default=None)
"""Pass of the block that computes in this thread; None if the block is not recomputed."""


def _passes() -> list[_Pass]:
    """Return the contexts of a block's forward pass and of its recomputation."""
    results: list[Any] = []
    return [_Pass(results, again) for again in (False, True)]


def once(compute: Callable[[], Any]) -> Any:
    """Return `compute()`, which draws no random numbers; a recomputation gets the same result.

    All tensors that its backward pass needs are kept. Only a tensor can have a gradient.
    """
    current = _current.get()
    if current is None:
        return compute()
    if current.again:
        return next(current.unread)

    # These hooks take the place of those that would leave the tensors to the recomputation.
    with saved_tensors_hooks(Tensor.detach, lambda kept: kept):
        result = compute()
    is_leaf = isinstance(result, Tensor) and result.requires_grad
    current.results.append(result.detach().requires_grad_() if is_leaf else result)
    return result


def _with_inputs_on_host(function: Callable[..., Any], block: Callable, *args: Any) -> Any:
    """Call a checkpoint function, whose inputs are in host memory until the backward pass.

    A block without gradients, as in a frozen tower, has no backward pass, so it is called directly.
    """
    layer = (block.func if isinstance(block, partial) else block).__self__
    if not any(x.requires_grad for x in filter(torch.is_tensor, (*layer.parameters(), *args))):
        return block(*args)
    with saved_tensors_hooks(HostTensor, HostTensor.back):
        return function(block, *args)


class HostTensor:
    """Tensor that is copied to host memory while a block computes, and back one block ahead."""

    newest: "Callable[[], HostTensor | None]" = staticmethod(lambda: None)
    """The one that left last. A graph owns it; with its predecessors it would never be freed."""
    on_device: Tensor | None = None

    def __init__(self, tensor: Tensor):
        """Begin to copy the tensor; the device has the one before no longer."""
        self.before = HostTensor.newest
        HostTensor.newest = weakref.ref(self)
        if (previous := self.before()) is not None:
            previous.take()
        pinned = tensor.device.type not in ("cpu", "meta")
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        self.wait = begin_copy(self.host, tensor)
        self.on_device, self.device = tensor.detach(), tensor.device

    def __del__(self):
        """Let the device wait, so nothing else gets memory of a graph that is dropped too early."""
        self.take()

    def take(self) -> Tensor | None:
        """Return the tensor on the device, if there is one, and keep it no longer."""
        tensor, self.on_device = self.on_device, None
        if tensor is not None:
            self.wait()
        return tensor

    def fetch(self) -> None:
        """Begin to copy the values back, unless they are on the device."""
        if self.on_device is None:
            self.on_device = torch.empty_like(self.host, device=self.device)
            self.wait = begin_copy(self.on_device, self.host)

    def back(self) -> Tensor:
        """Return the tensor on the device, and begin to fetch the one before."""
        self.fetch()
        tensor = self.take()
        if (previous := self.before()) is not None:
            previous.fetch()
        return tensor
