"""Tensor parallelism for transformers models: attention heads, feed-forward columns and the vocabulary are split over ranks.

The plan is defined here and applied with torch's parallelize_module; the code of the models is not changed. The residual stream
is replicated on all ranks, with one all-reduce after the attention and one after the feed-forward of each block, and one for
each in the backward pass. With sequence parallelism (arXiv 2205.05198) each rank keeps a part of the tokens instead: the
all-reduces become reduce-scatters, all-gathers precede attention and feed-forward, and norms process a part of the tokens. Apply
it before fully_shard, which then shards the local parts over the data ranks.

This file is the one to adapt to changes of torch or transformers that concern tensor parallelism; versions.py lists the tested
versions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PretrainedConfig, PreTrainedModel

from lightrft.parallel.collectives import Axis
from lightrft.parallel.sequence_parallel import select_tokens

HEAD_DIM: dict[str, int | None] = {
    **dict.fromkeys(("llama", "qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text")),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), 2),
    "gemma3_text": 1,
}
"""Supported values of model_type -> dim of the heads in the input of the query and key norms; None without such norms."""


CALLED = ("self_attn", "mlp")
"""Modules of a block without parameters of their own, whose inputs are redistributed."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Consecutive rows of an output embedding [V, H] that this rank holds."""

    weight: Tensor
    """Plain tensor [V of this rank, H] whose gradient flows to the sharded parameter. It may have no rows."""
    first: int
    """Token id of the first row."""
    size: int
    """Size V of the vocabulary over all ranks."""
    axis: Axis


def parallelize(module: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """Split every language model inside `module` over the one-dimensional `mesh`, in place. All ranks must hold equal weights.

    Of a model that reads media, the language part is split; each rank computes the towers whole, with equal gradients. Tied
    embeddings stay tied. With `sequence` the number of tokens of a batch must be a multiple of the number of ranks. Raise
    ValueError, with all reasons, for a model that cannot be split, and for a module without a transformers model.
    """
    models = list(_language_models(module))
    if not models:
        raise ValueError(f"--tp_size {mesh.size()}: {type(module).__name__} contains no transformers model to split")
    for model in models:
        problems = model_problems(model.config, mesh.size()) or plan_problems(model)
        if problems:
            raise ValueError(f"--tp_size {mesh.size()} cannot split {type(model).__name__}: {'; '.join(problems)}")
        _split(model, mesh, Shard(1) if sequence else Replicate())


def model_problems(config: PretrainedConfig, tp: int) -> list[str]:
    """Return all reasons why a model of this configuration cannot be split over `tp` ranks."""
    config = config.get_text_config()
    if config.model_type not in HEAD_DIM:
        return [f"its family {config.model_type!r} has no plan; supported are {', '.join(HEAD_DIM)}"]
    return head_problems(config.num_attention_heads, config.num_key_value_heads, tp)


def head_problems(num_heads: int, num_kv_heads: int, tp: int) -> list[str]:
    heads = {"attention heads": num_heads, "key-value heads": num_kv_heads}
    return [f"tp_size {tp} does not divide its {count} {name}" for name, count in heads.items() if count % tp]


def plan_problems(model: PreTrainedModel) -> list[str]:
    """Return how the blocks differ from those of the plan: another version of transformers may have renamed modules."""
    head_dim = HEAD_DIM[model.config.get_text_config().model_type]
    problems = []
    for block in model.get_decoder().layers[:1]:
        names = {name for name, part in block.named_modules() if next(part.parameters(recurse=False), None) is not None}
        planned = {name for name in _block_plan(block, head_dim, Shard(1)) if name not in CALLED}
        if names != planned:
            problems.append(f"its blocks have {', '.join(sorted(names))}, the plan is for {', '.join(sorted(planned))}")
    return problems


def vocabulary_shard(weight: Tensor) -> VocabularyShard | None:
    """Return this rank's part of an output embedding that parallelize() has split; None for a plain tensor.

    Raise RuntimeError if it is sharded in another way, as outside of the module's forward.
    """
    if not isinstance(weight, DTensor):
        return None
    mesh = weight.device_mesh
    if mesh.ndim != 1 or weight.placements != (Shard(0),):
        raise RuntimeError(
            f"the output embedding is sharded as {weight.placements} on {mesh}: use it inside the module's forward"
        )
    axis, rows = _axis(mesh), -(-weight.shape[0] // mesh.size())
    return VocabularyShard(weight.to_local(), min(axis.rank * rows, weight.shape[0]), weight.shape[0], axis)


def copy_to_parallel_region(hidden: Tensor, axis: Axis) -> Tensor:
    """Return the same tensor, equal on all ranks, for use in different computations: its gradient is summed over the ranks."""
    return hidden if axis.size == 1 else _Branch.apply(hidden, axis)


class _Branch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.sum(gradient), None


def _language_models(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the outermost transformers models."""
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from _language_models(child)


def _split(model: PreTrainedModel, mesh: DeviceMesh, stream: Placement) -> None:
    """Split a model. `stream` is the placement of the residual stream [1, T, H]: replicated or sharded by tokens.

    Where media replace embeddings between the embedding layer and the decoder, the decoder divides the tokens.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    decoder = model.get_decoder()
    head_dim = HEAD_DIM[model.config.get_text_config().model_type]
    for block in decoder.layers:
        _apply(block, mesh, _block_plan(block, head_dim, stream))
    embedded = stream if decoder is model.base_model else Replicate()
    _apply(decoder, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=embedded)})
    if stream != embedded:
        decoder.register_forward_pre_hook(partial(_divide_tokens, axis=_axis(mesh)), with_kwargs=True)
    if stream.is_shard():
        _apply(decoder, mesh, {"norm": SequenceParallel(use_local_output=True)})
        _apply(decoder, mesh, {"norm": PrepareModuleOutput(output_layouts=stream, desired_output_layouts=Replicate())})
    if head is not None:
        _apply(model, mesh, {_name_of(model, head): ColwiseParallel(output_layouts=Replicate())})
    if tied:
        head.weight = embedding.weight


def _divide_tokens(decoder: nn.Module, args: tuple, kwargs: dict[str, Any], *, axis: Axis) -> tuple[tuple, dict[str, Any]]:
    """Keep this rank's part of a decoder's inputs, whose gradient is summed over the ranks: a forward pre-hook."""
    embedded = kwargs["inputs_embeds"]
    positions = torch.arange(embedded.shape[1], device=embedded.device).chunk(axis.size)[axis.rank]
    return args, kwargs | select_tokens(kwargs, positions, lambda values: copy_to_parallel_region(values, axis))


def _axis(mesh: DeviceMesh) -> Axis:
    group = mesh.get_group()
    return Axis("tp", mesh.size(), dist.get_rank(group), group if mesh.size() > 1 else None)


def _block_plan(block: nn.Module, head_dim: int | None, stream: Placement) -> dict[str, ParallelStyle]:
    """Return the plan of a block: all-reduces follow only the row-wise layers, and in the backward pass the column-wise ones.

    A norm processes a part of the tokens, or, for queries and keys, this rank's heads only. Its weight is replicated, so that
    each rank has a partial gradient: as a DTensor the gradient is marked as partial, and FSDP sums it.
    """
    replicated, columns, rows = Replicate(), ColwiseParallel(), RowwiseParallel(output_layouts=stream)
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": stream}, desired_input_kwarg_layouts={"hidden_states": replicated}
        ),
        "mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(replicated,)),
        "self_attn.o_proj": rows,
        "mlp.down_proj": rows,
    }
    plan |= dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"), columns)
    if head_dim is not None:
        norm = SequenceParallel(sequence_dim=head_dim, use_local_output=True)
        plan |= {"self_attn.q_norm": norm, "self_attn.k_norm": norm}
    if stream.is_shard():
        norms = [name for name, _ in block.named_children() if name.endswith("layernorm")]
        plan |= dict.fromkeys(norms, SequenceParallel(use_local_output=True))
    return plan


def _apply(module: nn.Module, mesh: DeviceMesh, plan: dict[str, Any]) -> None:
    """Apply a plan without communication: each rank keeps its own part. Frozen parameters stay frozen."""
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    parallelize_module(module, mesh, plan, src_data_rank=None)
    for name, parameter in module.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


def _name_of(model: nn.Module, part: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)
