"""Experts of a mixture in the layers of vLLM and SGLang.

A layer has two tensors, w13 [experts, gate and up, hidden] and w2. On a CPU vLLM packs both for the
kernel, in blocks of rows, padded to whole blocks; a reload does not repeat this. SGLang packs them
only on CPUs with AMX units.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

ATTRIBUTES = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Attribute names of transformers -> attribute names of the engines."""
ROUTED = "routed_experts"
"""Name of the layer inside a mixture of vLLM that holds the experts.

In SGLang the mixture itself holds them.
"""
INTERLEAVED_ROWS = 16
"""Number of rows that are interleaved element by element in the packed form for plain vector units.
"""
AS_LOADED = {"TRITON", "BATCHED_TRITON"}
"""vLLM kernels that keep the weights as they were loaded.

Others transpose or swap them and are not supported here.
"""

Index = slice | tuple[int, slice]


def is_experts(layer: nn.Module) -> bool:
    return is_a(layer, "RoutedExperts") or _is_sglangs(layer)


def _is_sglangs(layer: nn.Module) -> bool:
    return is_a(layer, "FusedMoE")


def expert_addresses(
    layer: nn.Module, attribute: str, shape: torch.Size
) -> Iterator[tuple[Index, int, int]]:
    """Yield (index in the layer's tensor, row, column) for each slice of the tensor of `shape`.

    The full tensor is [experts, rows, columns]; row and column are where the slice starts in it.
    Yield nothing if the layout is not known.
    """
    if not is_experts(layer) or not _is_known(layer):
        return

    first, size = _local_columns(layer)
    row = local_experts(layer).start * shape[1]
    if attribute == "w2_weight":
        yield slice(None), row, first
        return

    columns = shape[1] // 2
    if size == columns:
        yield slice(None), row, 0
        return

    num_columns = min(size, columns - first)
    # gate and up of each expert are split
    for half in range(2 * shape[0] if num_columns > 0 else 0):
        expert, up = divmod(half, 2)
        yield (expert, slice(up * size, up * size + num_columns)), half * columns + first, 0


def _local_columns(layer: nn.Module) -> tuple[int, int]:
    """Return the first hidden column of an expert that this rank holds, and how many it holds.

    Zero padding is included.
    """
    if _is_sglangs(layer):
        size = layer.intermediate_size_per_partition
        return layer.moe_tp_rank * size, size
    size = layer.moe_config.intermediate_size_per_partition
    return layer.moe_config.moe_parallel_config.tp_rank * size, size


def local_experts(layer: nn.Module) -> slice:
    """Return the experts that this rank's layer holds; all of them unless ranks divide them."""
    first = 0
    if not _is_sglangs(layer):
        # reading the layer's own map would wait for the device
        ranks = layer.moe_config.moe_parallel_config
        per_rank, more = divmod(layer.moe_config.num_experts, ranks.ep_size)
        first = ranks.ep_rank * per_rank + min(ranks.ep_rank, more)
    return slice(first, first + len(layer.w13_weight))


def expert_tensor(layer: nn.Module, attribute: str, index: Index) -> Tensor:
    """Return the layer's tensor at `index` as it was loaded."""
    first, *rest = index if isinstance(index, tuple) else (index,)
    return _plain(layer, attribute, getattr(layer, attribute)[first])[tuple(rest)]


def expert_blocks(layer: nn.Module, attribute: str) -> tuple[Tensor, int]:
    """Return a view of the parameter's own memory, and the first column.

    The view is [groups, blocks, rows of a block, columns]. Groups are experts, or gate and up of
    each. This supports only layers of vLLM without padding.
    """
    weight = getattr(layer, attribute)
    down = attribute == "w2_weight"
    groups = len(weight) if down else 2 * len(weight)
    block = INTERLEAVED_ROWS if _packs(layer) else 1
    columns = weight.shape[-1]
    if block > 1:
        blocks = weight.view(groups, -1, columns, block).transpose(-1, -2)
    else:
        blocks = weight.view(groups, -1, 1, columns)
    return blocks, _local_columns(layer)[0]


def is_filled_up(layer: nn.Module, attribute: str, shape: torch.Size) -> bool:
    """Return True if all ranks together hold more elements than the full tensor of this shape."""
    weight = getattr(layer, attribute)
    of_all_ranks = weight[0].numel() * layer.moe_config.moe_parallel_config.tp_size
    return of_all_ranks != shape[1:].numel()


def unpacked_experts(
    experts: Collection[nn.Module], excluded: Collection[nn.Module] = ()
) -> list[nn.Module]:
    """Replace packed weights, before a reload, by uninitialized ones of the loaded shape.

    Layers that are `excluded` keep theirs. Return the layers that have to be packed afterwards.
    """
    layers = [layer for layer in experts if _packs(layer) and layer not in excluded]
    for layer in layers:
        for attribute in ATTRIBUTES.values():
            parameter = getattr(layer, attribute)
            parameter.data = torch.empty_like(_plain(layer, attribute, parameter))
    return layers


def pack_experts(layers: list[nn.Module]) -> None:
    """Pack the weights of these layers after a reload."""
    for layer in layers:
        _kernel(layer).process_weights_after_loading(layer)


def _kernel(layer: nn.Module) -> Any:
    return layer.quant_method.moe_kernel.fused_experts


def _packs(layer: nn.Module) -> bool:
    """Return True if the layer's kernel has packed the weights; vLLM's kernels for CPUs do."""
    if _is_sglangs(layer):
        return False
    kernel = layer.quant_method.moe_kernel and _kernel(layer)
    return is_a(kernel, "CPUUnquantizedExperts") and not kernel._use_zentorch


def _is_known(layer: nn.Module) -> bool:
    """Return True if this rank holds all experts, or consecutive ones, in a known form."""
    if _is_sglangs(layer):
        return _is_known_of_sglangs(layer)
    divided = layer.moe_config.moe_parallel_config.ep_size > 1
    if divided and layer.expert_placement_strategy != "linear":
        return False
    if _packs(layer):
        return _kernel(layer).isa == "vec"
    method = layer.quant_method
    return (
        is_a(method, "UnquantizedFusedMoEMethod") and method.unquantized_backend.name in AS_LOADED
    )


def _is_known_of_sglangs(layer: nn.Module) -> bool:
    """Return True if SGLang keeps all experts as loaded, as on a CPU without AMX units.

    Other kernels may reorder them.
    """
    complete = (
        layer.moe_ep_size == 1
        and not layer.num_fused_shared_experts
        and layer.moe_runner_config.is_gated
    )
    on_plain_cpu = layer.w13_weight.device.type == "cpu" and not vars(layer).get(
        "use_intel_amx_backend", False
    )
    return complete and on_plain_cpu and is_a(layer.quant_method, "UnquantizedFusedMoEMethod")


def _plain(layer: nn.Module, attribute: str, weight: Tensor) -> Tensor:
    """Return a weight [..., rows, columns] without packing and padding.

    It is unchanged if it has neither.
    """
    if not _packs(layer):
        return weight
    *experts, rows, columns = weight.shape
    blocks = weight.reshape(*experts, rows // INTERLEAVED_ROWS, columns, INTERLEAVED_ROWS)
    rows_again = blocks.transpose(-1, -2).reshape(*experts, rows, columns)
    size = layer.moe_config.intermediate_size_per_partition
    if attribute == "w2_weight":
        return rows_again[..., :size]
    return rows_again.unflatten(-2, (2, rows // 2))[..., :size, :].flatten(-3, -2)


def is_a(thing: object, kind: str) -> bool:
    """Return True if the class of `thing` or a base class has this name.

    The classes belong to optional libraries.
    """
    return any(cls.__name__ == kind for cls in type(thing).__mro__)
