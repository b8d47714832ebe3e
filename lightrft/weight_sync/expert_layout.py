"""The experts of a mixture in the layers of vLLM and SGLang: all of a layer in two tensors, w13 [experts, gate and up, hidden]
and w2.

On a CPU vLLM packs both for its kernel, in blocks of rows, filled up to whole blocks; a reload forgets to. SGLang does that only
where there are AMX units.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

ATTRIBUTES = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""What transformers calls them -> what engines call them."""
ROUTED = "routed_experts"
"""The layer inside of a mixture of vLLM's that has them; in SGLang the mixture itself has."""
BLOCK = 16
"""Rows that lie together, element by element, in the packed form of plain vector units."""
AS_LOADED = {"TRITON", "BATCHED_TRITON"}
"""vLLM's kernels that leave the weights as they were loaded; others turn or swap them, and are not known here."""

Index = slice | tuple[int, slice]


def is_experts(layer: nn.Module) -> bool:
    return is_a(layer, "RoutedExperts") or _is_sglangs(layer)


def _is_sglangs(layer: nn.Module) -> bool:
    return is_a(layer, "FusedMoE")


def expert_places(layer: nn.Module, attribute: str, shape: torch.Size) -> Iterator[tuple[Index, int, int]]:
    """(part of the layer's tensor, row and column of the full tensor [experts, rows, columns]), whose shape is given.

    None where that is not known.
    """
    if not is_experts(layer) or not _is_known(layer):
        return
    first, own = _own_columns(layer)
    if attribute == "w2_weight":
        yield slice(None), 0, first
        return
    whole = shape[1] // 2
    if own == whole:
        yield slice(None), 0, 0
        return
    here = min(own, whole - first)
    for half in range(2 * shape[0] if here > 0 else 0):  # gate and up of each expert are cut
        expert, up = divmod(half, 2)
        yield (expert, slice(up * own, up * own + here)), half * whole + first, 0


def _own_columns(layer: nn.Module) -> tuple[int, int]:
    """Of an expert's hidden layer: the first that this rank has, and how many, with zeros behind them where it is filled up."""
    if _is_sglangs(layer):
        return layer.moe_tp_rank * layer.intermediate_size_per_partition, layer.intermediate_size_per_partition
    own = layer.moe_config.intermediate_size_per_partition
    return layer.moe_config.moe_parallel_config.tp_rank * own, own


def expert_part(layer: nn.Module, attribute: str, index: Index) -> Tensor:
    """As it was loaded."""
    first, *rest = index if isinstance(index, tuple) else (index,)
    return _plain(layer, attribute, getattr(layer, attribute)[first])[tuple(rest)]


def expert_blocks(layer: nn.Module, attribute: str) -> tuple[Tensor, int]:
    """Return a view of the parameter's own memory, [groups, blocks, rows of a block, columns], and its first column.

    Groups are experts, or gate and up of each. For layers of vLLM without rows or columns that only fill up.
    """
    weight = getattr(layer, attribute)
    down = attribute == "w2_weight"
    groups = len(weight) if down else 2 * len(weight)
    block = BLOCK if _packs(layer) else 1
    columns = weight.shape[-1]
    if block > 1:
        blocks = weight.view(groups, -1, columns, block).transpose(-1, -2)
    else:
        blocks = weight.view(groups, -1, 1, columns)
    return blocks, _own_columns(layer)[0]


def is_filled_up(layer: nn.Module, attribute: str, shape: torch.Size) -> bool:
    """Whether all ranks together have more than the full tensor of this shape."""
    return getattr(layer, attribute).numel() * layer.moe_config.moe_parallel_config.tp_size != shape.numel()


def unpacked_experts(model: nn.Module, kept: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Give packed weights, before a reload, the shape that is loaded, without their values; those of `kept` layers stay.

    Return the layers that have to be packed.
    """
    layers = [layer for layer in model.modules() if is_experts(layer) and _packs(layer) and layer not in kept]
    for layer in layers:
        for attribute in ATTRIBUTES.values():
            parameter = getattr(layer, attribute)
            parameter.data = torch.empty_like(_plain(layer, attribute, parameter))
    return layers


def pack_experts(layers: list[nn.Module]) -> None:
    """After a reload."""
    for layer in layers:
        _kernel(layer).process_weights_after_loading(layer)


def _kernel(layer: nn.Module) -> Any:
    return layer.quant_method.moe_kernel.fused_experts


def _packs(layer: nn.Module) -> bool:
    """Whether the layer's kernel, one of vLLM's for CPUs, has packed its weights."""
    if _is_sglangs(layer):
        return False
    kernel = layer.quant_method.moe_kernel and _kernel(layer)
    return is_a(kernel, "CPUUnquantizedExperts") and not kernel._use_zentorch


def _is_known(layer: nn.Module) -> bool:
    """Whether all experts lie here, in a form that is known."""
    if _is_sglangs(layer):
        return _is_known_of_sglangs(layer)
    if layer.moe_config.moe_parallel_config.ep_size > 1:
        return False
    if _packs(layer):
        return _kernel(layer).isa == "vec"
    method = layer.quant_method
    return is_a(method, "UnquantizedFusedMoEMethod") and method.unquantized_backend.name in AS_LOADED


def _is_known_of_sglangs(layer: nn.Module) -> bool:
    """On a CPU without AMX units they lie as they were loaded; kernels of accelerators may turn, swap or interleave them."""
    whole = layer.moe_ep_size == 1 and not layer.num_fused_shared_experts and layer.moe_runner_config.is_gated
    on_plain_cpu = layer.w13_weight.device.type == "cpu" and not vars(layer).get("use_intel_amx_backend", False)
    return whole and on_plain_cpu and is_a(layer.quant_method, "UnquantizedFusedMoEMethod")


def _plain(layer: nn.Module, attribute: str, weight: Tensor) -> Tensor:
    """[..., rows, columns] without packing and filling; the same where it is neither."""
    if not _packs(layer):
        return weight
    *experts, rows, columns = weight.shape
    blocks = weight.reshape(*experts, rows // BLOCK, columns, BLOCK)
    rows_again = blocks.transpose(-1, -2).reshape(*experts, rows, columns)
    own = layer.moe_config.intermediate_size_per_partition
    if attribute == "w2_weight":
        return rows_again[..., :own]
    return rows_again.unflatten(-2, (2, rows // 2))[..., :own, :].flatten(-3, -2)


def is_a(thing: object, kind: str) -> bool:
    """Whether its class has this name or one of its parents has: the classes are another library's."""
    return any(cls.__name__ == kind for cls in type(thing).__mro__)
