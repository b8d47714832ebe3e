"""Let vLLM's kernel for experts on CPUs hold some of the experts; importing this registers it."""

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

original_apply = CPUUnquantizedExperts.apply


def apply(
    kernel: CPUUnquantizedExperts, *, topk_weights: Tensor, topk_ids: Tensor, **options: Any
) -> None:
    """Compute the experts of this rank; the other ranks add theirs.

    vLLM's kernel ignores the map from all experts to those of the rank, and reads beyond its
    weights. Here experts of other ranks become the first one of this rank, with a weight of 0.
    """
    if (local_experts := options["expert_map"]) is not None:
        local_ids = local_experts[topk_ids.long()]
        topk_weights = topk_weights.masked_fill(local_ids < 0, 0.0)
        topk_ids = local_ids.clamp(min=0).to(topk_ids.dtype)
    original_apply(kernel, topk_weights=topk_weights, topk_ids=topk_ids, **options)


CPUUnquantizedExperts.apply = apply
