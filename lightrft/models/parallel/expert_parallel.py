"""Expert parallelism: ranks divide the experts of each layer, and tokens visit them.

Each rank routes its own tokens. A layer sorts them by expert, sends each to the ranks of its
experts, computes there with the function that transformers has chosen, and sends the results back
(arXiv 2006.16668). Losses are shares of the mean over all ranks, so the gradient of an expert is
complete where it is computed: the ranks never sum it.

A shared expert needs no visit, so it runs while tokens are on their way to the others, and so does
its backward pass while their gradients return.

Outside of forward the parameters of a layer's experts are DTensors that are sharded by expert;
apply this before fully_shard, which then shards the experts of a rank over the ranks that hold the
same ones.
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from math import ceil
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from lightrft.models.outermost import outermost
from lightrft.models.parallel.collectives import Axis, same, with_gradient
from lightrft.models.parallel.recompute import once
from lightrft.models.parallel.tensor_parallel import LocalParameters, distribute

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Forward pass of a layer's experts: tokens [t, H], chosen experts [t, k], weights [t, k]."""


def divide_experts(
    module: nn.Module, mesh: DeviceMesh, axis: Axis, families: Collection[str]
) -> list[nn.Module]:
    """Divide the experts of every model inside `module` over the one-dimensional `mesh`, in place.

    `axis` has the ranks of the mesh. All of them must hold equal weights. Return the divided layers
    of experts; a model without experts stays as it is. Raise ValueError for a model whose type is
    not one of `families`, and for a number of experts that the ranks do not divide.
    """
    divided = []
    for model in outermost(module, PreTrainedModel):
        for experts in expert_layers(model):
            if problem := _problem(model, experts, axis.size, families):
                raise ValueError(f"--ep_size {axis.size}: {type(model).__name__} {problem}")

            names = [name for name, _ in experts.named_parameters(recurse=False)]
            distribute(experts, mesh, **dict.fromkeys(names, Shard(0)))
            LocalParameters(experts)
            experts.num_experts //= axis.size
            experts.forward = partial(visit, experts.forward, experts.num_experts, axis)
            divided.append(experts)

        for block in model.modules():
            if {"experts", "gate"} < set(block._modules) and _shared_expert(block) is not None:
                leave = partial(depart, block.experts.num_experts, axis)
                block.forward = partial(mixture_forward, block, leave)

    return divided


def expert_layers(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are the stacked experts of a layer: [experts, ...]."""
    return [
        submodule
        for submodule in module.modules()
        if any(
            name == "down_proj" and parameter.ndim == 3
            for name, parameter in submodule.named_parameters(recurse=False)
        )
    ]


def occupy_experts(model: nn.Module) -> None:
    """Let every expert of a model compute one or two tokens more in each pass, which are zero.

    It changes neither the results nor the gradients of a correct product. On Blackwell torch's
    product has wrong gradients for experts that compute no token (pytorch/pytorch#172439).
    """
    for experts in expert_layers(model):
        experts.forward = partial(_with_zeros, experts.forward, experts)


def _with_zeros(
    compute: Compute, experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Compute the tokens [t, H] with zeros behind them, whose weights are zero; each expert is
    chosen by one of these, or by two."""
    count, choices = len(experts.down_proj), chosen.shape[1]
    rows = ceil(count / choices)
    others = torch.arange(rows * choices, device=chosen.device, dtype=chosen.dtype) % count
    computed = compute(
        torch.cat([hidden, hidden.new_zeros(rows, hidden.shape[1])]),
        torch.cat([chosen, others.view(rows, choices)]),
        torch.cat([weights, weights.new_zeros(rows, choices)]),
    )
    return computed[: len(hidden)]


def routers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the router of each layer that has one, by the number of the layer.

    A router's forward returns the logits, the weights of the chosen experts, and their ids [t, k].
    """
    recorder = (model._can_record_outputs or {}).get("router_logits")
    if recorder is None:
        return {}
    return {
        number: submodule
        for number, layer in enumerate(model.get_decoder().layers)
        for submodule in layer.modules()
        if isinstance(submodule, recorder.target_class)
    }


class Departed(NamedTuple):
    """Tokens on their way to the experts of all ranks; t of them are to arrive at this one."""

    visitors: Tensor
    """Buffer that they arrive in, [t, H]: valid after the exchange."""
    exchange: "Exchange"
    order: Tensor
    """Index of each departed token among the chosen experts of all tokens, [tokens x k]."""
    received: Tensor
    """Number of tokens from each rank for each local expert, [ranks x local experts]."""


def depart(num_local: int, axis: Axis, hidden: Tensor, chosen: Tensor) -> Departed:
    """Send the tokens `hidden` [T, H] of this rank to the ranks of the experts that they chose.

    `chosen` [T, k] has expert ids over all ranks, each of which has `num_local`. All ranks must
    call this together; a rank may have no token.
    """
    order, received, sizes = once(partial(_plan_visit, num_local, axis, chosen))
    exchange = Exchange(*sizes, axis)
    visitors = _start(hidden[order // chosen.shape[1]], exchange)
    return Departed(visitors, exchange, order, received)


def _plan_visit(num_local: int, axis: Axis, chosen: Tensor) -> tuple[Tensor, Tensor, list]:
    """Return `order` and `received` of Departed, and how many tokens go to and come from each rank.

    A recomputed layer does not ask for it again: the host would wait once more, and the device,
    which has nothing to do meanwhile.
    """
    ids, order = chosen.flatten().sort(stable=True)
    # Unlike bincount, this does not wait for the device.
    ends = torch.searchsorted(
        ids, torch.arange(num_local * axis.size, device=ids.device), right=True
    )
    sent = ends.diff(prepend=ends.new_zeros(1))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)

    # The host waits here, and nowhere else: a collective has to know the sizes of the chunks.
    counts = torch.stack([sent, received]).unflatten(1, (axis.size, num_local)).sum(-1)
    return order, received, counts.tolist()


def visit(
    compute: Compute,
    num_local: int,
    axis: Axis,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    departed: Departed | None = None,
) -> Tensor:
    """Let experts on all ranks compute the tokens of this rank: [T, H].

    `departed`: what `depart` has returned for these tokens, if they have been sent already.
    """
    visitors, exchange, order, received = departed or depart(num_local, axis, hidden, chosen)
    visitors = _finish(visitors, exchange)
    local_experts = torch.arange(num_local, device=order.device).repeat(axis.size)
    local_experts = local_experts.repeat_interleave(received, output_size=len(visitors))[:, None]
    computed = compute(visitors, local_experts, torch.ones_like(local_experts, dtype=hidden.dtype))

    back = Exchange(exchange.received, exchange.sent, axis)
    returned = _finish(_start(computed, back), back)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return _WeightedSum.apply(returned, inverse.view(chosen.shape), weights)


class _WeightedSum(torch.autograd.Function):
    """Sum of the k rows of each token with its weights: rows [n, H], places and weights [T, k].

    Rows in the order of tokens would take as much memory as the rows do, and so would products with
    weights. They exist for a part of the tokens at a time.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, places, weights)
        parts = _parts(places, weights)
        return torch.cat([(rows[at] * of[..., None]).sum(1).to(rows.dtype) for at, of in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, places, weights = ctx.saved_tensors
        of_rows, of_weights = torch.empty_like(rows), torch.empty_like(weights)
        gradient = gradient.to(torch.result_type(rows, weights))[:, None]
        for of_sum, at, of, of_part in _parts(gradient, places, weights, of_weights):
            of_part.copy_((of_sum * rows[at]).sum(-1))
            # Each row has one place.
            of_rows[at] = (of_sum * of[..., None]).to(rows.dtype)
        return of_rows, None, of_weights


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors over the same tokens [T, ...] into four parts."""
    size = max(1, ceil(len(tensors[0]) / 4))
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def _shared_expert(block: nn.Module) -> nn.Module | None:
    """Return the expert of a block that all tokens visit, under either of its names."""
    return block._modules.get("shared_experts", block._modules.get("shared_expert"))


def mixture_forward(
    block: nn.Module, leave: Callable[[Tensor, Tensor], Departed], hidden: Tensor
) -> Tensor:
    """Compute a block with a shared expert, [B, S, H], as the families of transformers do.

    Only the order is another one: the tokens leave first, and then the shared expert runs.
    """
    flat = hidden.flatten(0, -2)
    _, weights, chosen = block.gate(flat)
    departed = leave(flat, chosen)

    shared = _shared_expert(block)(flat)
    # Qwen's families weight it.
    if (gate := block._modules.get("shared_expert_gate")) is not None:
        shared = gate(flat).sigmoid() * shared

    routed = block.experts(flat, chosen, weights, departed)
    return (routed + shared).view(hidden.shape)


class Exchange:
    """Exchange of rows [n, H] over the ranks of an axis: the first `sent[0]` go to rank 0, etc.

    Gradients go the way back.
    """

    def __init__(self, sent: list[int], received: list[int], axis: Axis):
        self.sent = sent
        self.received = received
        self.axis = axis
        self._pending: tuple[dist.Work, Tensor, Tensor] | None = None
        """What to wait for, and the rows that leave and arrive until then."""

    def start(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Return the buffer that the rows of all ranks arrive in."""
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        leaving = rows.contiguous()
        arriving = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(
            arriving, leaving, received, sent, group=self.axis.group, async_op=True
        )
        self._pending = (work, leaving, arriving)
        return arriving

    def finish(self) -> Tensor:
        """Return the rows that have arrived; on an accelerator only the device waits for them."""
        work, _, arrived = self._pending
        work.wait()
        self._pending = None
        return arrived


def _start(rows: Tensor, exchange: Exchange) -> Tensor:
    """Begin an exchange; the backward pass ends the exchange of the gradients."""
    return with_gradient(rows, exchange.start, lambda _: exchange.finish())


def _finish(rows: Tensor, exchange: Exchange) -> Tensor:
    """End an exchange; the backward pass begins the exchange of the gradients."""

    def finish(rows: Tensor) -> Tensor:
        exchange.finish()
        return same(rows)

    def start_back(gradient: Tensor) -> Tensor:
        exchange.start(gradient, back=True)
        # _start returns the gradient that arrives. This only has the shape that autograd wants.
        return gradient

    return with_gradient(rows, finish, start_back)


def _problem(model: PreTrainedModel, experts: nn.Module, ep: int, families: Collection[str]) -> str:
    """Return why the experts of a layer cannot be divided; empty if they can."""
    family = model.config.get_text_config().model_type
    if family not in families:
        return f"is of the family {family}; supported are {', '.join(families)}"
    if experts.num_experts % ep:
        return f"has {experts.num_experts} experts in a layer, and {ep} does not divide them"
    return ""
