"""Activation checkpointing: activations are recomputed in the backward pass instead of stored."""

from functools import partial
from typing import Any

from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
EXPERT_PRODUCTS = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}
"""Matrix products of a layer's experts, on a GPU and elsewhere."""
SUMS = {"lightrft::sum_", "lightrft::reduce_scatter_"}
"""Sums of products over tensor-parallel ranks. They change a product that is kept, so they must not
run again."""
KEPT = PRODUCTS | EXPERT_PRODUCTS | SUMS


def recompute(module: nn.Module, *, selective: bool) -> None:
    """Enable activation checkpointing for the blocks of every transformers model inside `module`.

    A block keeps only its input. With `selective` it also keeps the results of attention and matrix
    products, summed over tensor-parallel ranks, so that the recomputation costs next to nothing.
    Products of experts with biases (gpt_oss) are recomputed all the same.
    """
    if isinstance(module, PreTrainedModel):
        # transformers adds biases of experts into the product, which could not be used once more.
        biased = any(name.endswith("down_proj_bias") for name, _ in module.named_parameters())
        keep = keep_expensive_but_experts if biased else keep_expensive
        options = (
            {"context_fn": partial(create_selective_checkpoint_contexts, keep)} if selective else {}
        )
        module.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, **options}
        )
        return

    for child in module.children():
        recompute(child, selective=selective)


def keep_expensive(_: Any, op: OpOverload, *args: Any, **options: Any) -> CheckpointPolicy:
    """Return the checkpoint policy of an operation inside a block.

    Attention with dropout is recomputed: if skipped, it would not draw random numbers, and all
    later draws would differ.
    """
    name = op.name()
    attention = ("attn" in name or "attention" in name) and not _dropout(op, args, options)
    if attention or name in KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def keep_expensive_but_experts(
    context: Any, op: OpOverload, *args: Any, **options: Any
) -> CheckpointPolicy:
    """Return the same policy, but recompute the products of experts."""
    if op.name() in EXPERT_PRODUCTS:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return keep_expensive(context, op, *args, **options)


def _dropout(op: OpOverload, args: tuple, options: dict[str, Any]) -> float:
    arguments = (
        dict(zip((argument.name for argument in op._schema.arguments), args, strict=False))
        | options
    )
    return arguments.get("dropout_p", 0.0)
