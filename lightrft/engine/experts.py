"""The experts of a mixture in vLLM's layers: all of a layer in two tensors, w13 [experts, gate and up, hidden] and w2.

On a CPU vLLM packs both for its kernel, in blocks of rows, filled up to whole blocks; a reload forgets to.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

ATTRIBUTES = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""What transformers calls them -> what vLLM calls them."""
ROUTED = "routed_experts"
"""The layer inside of a mixture that has them."""
BLOCK = 16
"""Rows that lie together, element by element, in the packed form of plain vector units."""

Index = slice | tuple[int, slice]


def is_experts(layer: nn.Module) -> bool:
    return any(kind.__name__ == "RoutedExperts" for kind in type(layer).__mro__)


def expert_places(layer: nn.Module, attribute: str) -> Iterator[tuple[Index, int, int]]:
    """(part of the layer's tensor, row and column of the full tensor [experts, rows, columns]); none where that is not known."""
    split = layer.moe_config.moe_parallel_config
    if split.ep_size > 1 or (_kernel(layer) is not None and _kernel(layer).isa != "vec"):
        return
    own = layer.moe_config.intermediate_size_per_partition
    if split.tp_size == 1 or attribute == "w2_weight":
        yield slice(None), 0, split.tp_rank * own if attribute == "w2_weight" else 0
        return
    for half in range(2 * layer.local_num_experts):  # gate and up of each expert are cut
        expert, up = divmod(half, 2)
        yield (expert, slice(up * own, (up + 1) * own)), (half * split.tp_size + split.tp_rank) * own, 0


def expert_part(layer: nn.Module, attribute: str, index: Index) -> Tensor:
    """As it was loaded."""
    first, *rest = index if isinstance(index, tuple) else (index,)
    return _plain(layer, attribute, getattr(layer, attribute)[first])[tuple(rest)]


def unpacked_experts(model: nn.Module) -> list[nn.Module]:
    """Before a reload: gives packed weights the shape that is loaded, without their values. The layers that have to be packed."""
    layers = [layer for layer in model.modules() if is_experts(layer) and _kernel(layer) is not None]
    for layer in layers:
        for attribute in ATTRIBUTES.values():
            parameter = getattr(layer, attribute)
            parameter.data = torch.empty_like(_plain(layer, attribute, parameter))
    return layers


def pack_experts(layers: list[nn.Module]) -> None:
    """After a reload."""
    for layer in layers:
        _kernel(layer).process_weights_after_loading(layer)


def _kernel(layer: nn.Module) -> object | None:
    """What packs the layer's weights on a CPU; None elsewhere."""
    kernel = layer.quant_method.moe_kernel.fused_experts
    packs = any(kind.__name__ == "CPUUnquantizedExperts" for kind in type(kernel).__mro__)
    return kernel if packs and not kernel._use_zentorch else None


def _plain(layer: nn.Module, attribute: str, weight: Tensor) -> Tensor:
    """[..., rows, columns] without packing and filling; the same where it is neither."""
    kernel = _kernel(layer)
    if kernel is None:
        return weight
    *experts, rows, columns = weight.shape
    blocks = weight.reshape(*experts, rows // BLOCK, columns, BLOCK)
    rows_again = blocks.transpose(-1, -2).reshape(*experts, rows, columns)
    own = layer.moe_config.intermediate_size_per_partition
    if attribute == "w2_weight":
        return rows_again[..., :own]
    return rows_again.unflatten(-2, (2, rows // 2))[..., :own, :].flatten(-3, -2)
