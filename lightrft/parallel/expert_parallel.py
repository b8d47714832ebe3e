"""Expert parallelism: ranks divide the experts of each layer, and tokens visit them.

Each rank routes its own tokens. A layer sorts them by expert, sends each to the ranks of its
experts, computes there with the function that transformers has chosen, and sends the results back
(arXiv 2006.16668). Losses are shares of the mean over all ranks, so the gradient of an expert is
complete where it is computed: the ranks never sum it.

The code of the models is not changed. Outside of forward the parameters of a layer's experts are
DTensors that are sharded by expert; apply this before fully_shard, which then shards the experts of
a rank over the ranks that hold the same ones.
"""

from collections.abc import Callable, Collection
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from lightrft.parallel.collectives import Axis
from lightrft.parallel.tensor_parallel import LocalParameters, distribute, outermost_models

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
    for model in outermost_models(module):
        for experts in expert_layers(model):
            if problem := _problem(model, experts, axis.size, families):
                raise ValueError(f"--ep_size {axis.size}: {type(model).__name__} {problem}")

            names = [name for name, _ in experts.named_parameters(recurse=False)]
            distribute(experts, mesh, **dict.fromkeys(names, Shard(0)))
            LocalParameters(experts)
            experts.num_experts //= axis.size
            experts.forward = partial(visit, experts.forward, experts.num_experts, axis)
            divided.append(experts)

    return divided


def expert_layers(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are the stacked experts of a layer: [experts, ...]."""
    return [
        part
        for part in module.modules()
        if any(
            name == "down_proj" and parameter.ndim == 3
            for name, parameter in part.named_parameters(recurse=False)
        )
    ]


def routers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the router of each layer that has one, by the number of the layer.

    A router's forward returns the logits, the weights of the chosen experts, and their ids [t, k].
    """
    recorder = (model._can_record_outputs or {}).get("router_logits")
    if recorder is None:
        return {}
    return {
        number: part
        for number, layer in enumerate(model.get_decoder().layers)
        for part in layer.modules()
        if isinstance(part, recorder.target_class)
    }


def visit(
    compute: Compute, num_own: int, axis: Axis, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Let experts on all ranks compute the tokens of this rank: [t, H].

    `chosen` [t, k] has expert ids over all ranks, each of which has `num_own`. All ranks must call
    this together; a rank may have no token.
    """
    ids, order = chosen.flatten().sort(stable=True)
    # Unlike bincount, this does not wait for the device.
    ends = torch.searchsorted(ids, torch.arange(num_own * axis.size, device=ids.device), right=True)
    sent = ends.diff(prepend=ends.new_zeros(1))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)

    # The host waits here, and nowhere else: a collective has to know the sizes of the parts.
    counts = torch.stack([sent, received]).unflatten(1, (axis.size, num_own)).sum(-1)
    to_ranks, from_ranks = counts.tolist()
    visitors = _Exchange.apply(hidden[order // chosen.shape[1]], to_ranks, from_ranks, axis)
    own = torch.arange(num_own, device=ids.device).repeat(axis.size)
    own = own.repeat_interleave(received, output_size=len(visitors))[:, None]
    computed = compute(visitors, own, torch.ones_like(own, dtype=hidden.dtype))

    returned = _Exchange.apply(computed, from_ranks, to_ranks, axis)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=ids.device)
    results = returned[places].unflatten(0, chosen.shape)

    return (results * weights[..., None]).sum(1).to(hidden.dtype)


class _Exchange(torch.autograd.Function):
    """Exchange of rows [n, H]: the first `sent[0]` of them go to rank 0, and so on.

    Gradients go the way back.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, sent: list[int], received: list[int], axis: Axis
    ) -> Tensor:
        ctx.way = (sent, received, axis)
        return _all_to_all(rows, sent, received, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, axis = ctx.way
        return _all_to_all(gradient, received, sent, axis), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=axis.group)
    return result


def _problem(model: PreTrainedModel, experts: nn.Module, ep: int, families: Collection[str]) -> str:
    """Return why the experts of a layer cannot be divided; empty if they can."""
    family = model.config.get_text_config().model_type
    if family not in families:
        return f"is of the family {family}; supported are {', '.join(families)}"
    if experts.num_experts % ep:
        return f"has {experts.num_experts} experts in a layer, and {ep} does not divide them"
    return ""
