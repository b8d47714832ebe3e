"""Tensor parallelism for transformers models.

Attention heads, feed-forward columns and the vocabulary are split over ranks. The residual stream
is replicated on all ranks, with one all-reduce after the attention and one after the feed-forward
of each block, and one for each in the backward pass (arXiv 1909.08053). With sequence parallelism
(arXiv 2205.05198) each rank keeps a shard of the tokens instead: the all-reduces become
reduce-scatters, all-gathers precede attention and feed-forward, and norms process a shard of the
tokens. The code of the models is not changed: forward hooks exchange activations, and let each
module compute with this rank's shard of the weights. Weights are DTensors outside of forward; apply
this before fully_shard, which then shards the local shards over the data ranks.

Activations are plain tensors. As DTensors they would cost the host milliseconds per micro-batch:
torch plans each operation once for each shape, and micro-batches differ in the number of tokens.

This file is the one to adapt to changes of torch or transformers that concern tensor parallelism;
versions.py lists the tested versions.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import InitVar, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from transformers import PretrainedConfig, PreTrainedModel

from lightrft.config.tables import table
from lightrft.models.outermost import outermost
from lightrft.models.parallel.collectives import Axis, same, with_gradient
from lightrft.models.parallel.sequence_parallel import (
    Gather,
    all_gather_tensor,
    begin_reduce_scatter,
    select_tokens,
)

FAMILIES: list[str] = table("models/families")["tensor_parallel"]
"""Supported values of model_type."""
ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "gate_up_proj")
"""Layers that read the residual stream, where a block has them."""
FUSED_FAMILIES = ("glm4", "phi3")
"""Families with fused layers. Ranks need equally many rows of these."""
Split = Callable[[nn.Module, DeviceMesh], None]
"""Function that lets the ranks of a mesh divide a module."""
NORMS_OF_ALL_HEADS = ("Olmo2RMSNorm", "Olmo3RMSNorm")
"""Norms of queries and keys that may be over all heads together."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Consecutive rows of an output embedding [V, H] that this rank holds."""

    weight: Tensor
    """Plain tensor [V of this rank, H] whose gradient flows to the sharded parameter. It may have
    no rows."""
    first: int
    """Token id of the first row."""
    size: int
    """Size V of the vocabulary over all ranks."""
    axis: Axis


class Sections:
    """Rows of a fused layer [R, ...], such as queries, keys and values end to end.

    Outside of forward each rank stores R / ranks consecutive rows, so that a DTensor has the
    published layout. Forward uses as many others: this rank's share of each section. All ranks
    exchange rows for that.
    """

    def __init__(self, sizes: Sequence[int], axis: Axis):
        """`sizes` are multiples of the number of ranks."""
        self.axis = axis
        stored = sum(sizes) // axis.size
        self.sent = [0] * axis.size
        """How many rows this rank stores for each other."""
        self.received = [0] * axis.size
        self.runs: list[slice] = []
        """Stored rows, in the order of the ranks that use them."""

        for user in range(axis.size):
            first = 0
            for size in sizes:
                share = size // axis.size
                begin = first + user * share
                for owner in range(axis.size):
                    start = max(begin, owner * stored)
                    count = min(begin + share, (owner + 1) * stored) - start
                    if count <= 0:
                        continue
                    if owner == axis.rank:
                        self.runs.append(
                            slice(start - owner * stored, start + count - owner * stored)
                        )
                        self.sent[user] += count
                    if user == axis.rank:
                        self.received[owner] += count
                first = first + size

    def exchanged(self, stored: Tensor) -> Tensor:
        """Return the rows of used(), with a gradient."""
        return with_gradient(stored, self.used, self.stored)

    def used(self, stored: Tensor) -> Tensor:
        """Return the rows that this rank computes with, given those that it stores."""
        rows = torch.cat([stored[run] for run in self.runs])
        return self._sent(rows, self.sent, self.received)

    def stored(self, used: Tensor) -> Tensor:
        """Return the rows that this rank stores, given those that it computes with."""
        arrived = self._sent(used, self.received, self.sent)
        rows = torch.empty_like(used)
        sizes = [run.stop - run.start for run in self.runs]
        for run, piece in zip(self.runs, arrived.split(sizes), strict=True):
            rows[run] = piece
        return rows

    def _sent(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        width = rows[0].numel()
        counts = ([count * width for count in each] for each in (sent, received))
        return self.axis.all_to_all(rows.flatten(), *counts).view_as(rows)


def _linear_of_sections(hidden: Tensor, stored: Tensor, sections: Sections) -> Tensor:
    """Multiply with the rows that this rank uses, given those that it stores.

    The backward pass exchanges them again, so that no copy stays in between. The weight gets no
    gradient here.
    """
    return with_gradient(
        hidden,
        lambda hidden: F.linear(hidden, sections.used(stored)),
        lambda gradient: gradient @ sections.used(stored),
    )


@dataclass(frozen=True, slots=True)
class SplitAdapter:
    """A low-rank adapter of a layer that ranks divide.

    B is divided by the layer's outputs, or A by the layer's inputs. The other matrix is whole on
    each rank.
    """

    a_gradient: Placement
    b_gradient: Placement
    join: Callable[[Tensor], Tensor]
    """Function from A x [1, T, rank], of this rank's inputs, to the sum over all ranks."""
    sections: Sections | None = None
    """Rows of B, if the layer is a fused one."""

    def local(self, a: DTensor, b: DTensor) -> tuple[Tensor, Tensor]:
        """Return this rank's shards of A and B, with the gradients that ranks have of them."""
        local_b = b.to_local(grad_placements=[self.b_gradient])
        return (
            a.to_local(grad_placements=[self.a_gradient]),
            local_b if self.sections is None else self.sections.exchanged(local_b),
        )


def parallelize(module: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """Split every language model inside `module` over the one-dimensional `mesh`, in place.

    All ranks must hold equal weights. If a model reads media, the language part is split, and each
    rank computes the towers whole, with equal gradients. Tied embeddings stay tied. With `sequence`
    the number of tokens of a batch must be a multiple of the number of ranks. Raise ValueError,
    with all reasons, for a model that cannot be split, and for a module without a transformers
    model.
    """
    models = list(outermost(module, PreTrainedModel))
    if not models:
        raise ValueError(
            f"--tp_size {mesh.size()}: {type(module).__name__} contains no transformers model to"
            " split"
        )

    for model in models:
        problems = model_problems(model.config, mesh.size()) or plan_problems(
            model, sequence=sequence
        )
        if problems:
            raise ValueError(
                f"--tp_size {mesh.size()} cannot split {type(model).__name__}:"
                f" {'; '.join(problems)}"
            )
        _split(model, mesh, sequence)


def model_problems(config: PretrainedConfig, tp: int) -> list[str]:
    """Return all reasons why a model of this configuration cannot be split over `tp` ranks."""
    config = config.get_text_config()
    if config.model_type not in FAMILIES:
        return [
            f"its family {config.model_type!r} has no plan; supported are {', '.join(FAMILIES)}"
        ]
    return [
        *head_problems(config.num_attention_heads, config.num_key_value_heads, tp),
        *row_problems(config.vocab_size, "rows of the vocabulary", tp),
        *row_problems(config.intermediate_size, "columns of the feed-forward layers", tp),
        *fused_problems(config, tp),
    ]


def row_problems(size: int, name: str, tp: int) -> list[str]:
    """Return why so many rows leave a rank without any.

    Each rank has as many as the first, and the last ones have the rest.
    """
    with_rows = -(-size // -(-size // tp))
    if with_rows < tp:
        return [f"its {size} {name} are too few: only {with_rows} ranks have some"]
    return []


def fused_problems(config: PretrainedConfig, tp: int) -> list[str]:
    """Return why ranks cannot exchange the rows of fused feed-forward layers."""
    columns = config.intermediate_size
    if config.model_type in FUSED_FAMILIES and columns % tp:
        return [f"tp_size {tp} does not divide its {columns} fused columns"]
    return []


def head_problems(num_heads: int, num_kv_heads: int, tp: int) -> list[str]:
    heads = {"attention heads": num_heads, "key-value heads": num_kv_heads}
    return [
        f"tp_size {tp} does not divide its {count} {name}"
        for name, count in heads.items()
        if count % tp
    ]


def plan_problems(model: PreTrainedModel, *, sequence: bool = False) -> list[str]:
    """Return how the blocks differ from the plan's.

    Another version of transformers may have renamed modules.
    """
    problems = []
    for block in model.get_decoder().layers[:1]:
        # The blocks of a supported family are alike, so the first one stands for all.
        names = {
            name
            for name, child in block.named_modules()
            if next(child.parameters(recurse=False), None) is not None
        }
        if sequence and not _splits_feed_forward(block):
            return ["--tp_sequence_parallel does not support its feed-forward layers"]

        planned = _block_plan(block, sequence=True).keys()
        if names != planned:
            problems.append(
                f"its blocks have {', '.join(sorted(names))}, the plan is for"
                f" {', '.join(sorted(planned))}"
            )

    return problems


def vocabulary_shard(weight: DTensor) -> VocabularyShard:
    """Return this rank's shard of an output embedding that parallelize() has split.

    Raise RuntimeError if it is sharded in another way, as outside of the module's forward.
    """
    mesh = weight.device_mesh
    if mesh.ndim != 1 or weight.placements != (Shard(0),):
        raise RuntimeError(
            f"the output embedding is sharded as {weight.placements} on {mesh}: use it inside the"
            " module's forward"
        )

    axis = Axis.of("tp", mesh.get_group())
    rows = -(-weight.shape[0] // mesh.size())
    return VocabularyShard(
        weight.to_local(), min(axis.rank * rows, weight.shape[0]), weight.shape[0], axis
    )


def copy_to_parallel_region(hidden: Tensor, axis: Axis) -> Tensor:
    """Return the same tensor, equal on all ranks, for use in different computations.

    Its gradient is summed over the ranks.
    """
    return hidden if axis.size == 1 else with_gradient(hidden, same, axis.sum)


def _sum_in_place(values: Tensor, axis: Axis) -> Tensor:
    """Sum a new tensor over the ranks, in place.

    All ranks have the same gradient of the sum, and it is that of each summand. So autograd need
    not know of the sum.
    """
    if axis.size > 1:
        dist.all_reduce(values.detach(), group=axis.group)
    return values


def _scatter_tokens(value: Tensor, axis: Axis) -> Tensor:
    """Sum a new tensor over the ranks, in place, and return this rank's tokens.

    [1, T, H] -> [1, T / ranks, H]
    """

    def scatter(value: Tensor) -> Tensor:
        local = value.chunk(axis.size, 1)[axis.rank]
        if axis.size > 1:
            dist.reduce_scatter_tensor(local[0], value[0], group=axis.group)
        return local

    return with_gradient(
        value, scatter, lambda gradient: all_gather_tensor(gradient[0], axis)[None]
    )


class _EnterBranch(torch.autograd.Function):
    """Give the layers of a branch all tokens, and compute the gradients of their weights.

    Each layer has a stand-in among the results. It has the shape of the layer's output, no values,
    and the output's gradient. The gradient of the tokens is summed over the ranks while the
    gradients of the weights are computed.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, axis: Axis, sequence: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.sequence = sequence
        ctx.shape = hidden.shape
        ctx.set_materialize_grads(False)
        tokens = all_gather_tensor(hidden[0], axis)[None] if sequence else hidden.view_as(hidden)
        ctx.save_for_backward(tokens)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(tokens)

        nothing = tokens.new_empty(())
        return tokens, *(nothing.expand(*tokens.shape[:-1], len(weight)) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, gradient: Tensor | None, *of_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        wait = None
        if gradient is not None and ctx.sequence:
            wait = begin_reduce_scatter(gradient[0], ctx.axis)
        elif gradient is not None:
            # Only the layers of this branch have contributed to it, so nobody else has this tensor.
            wait = ctx.axis.begin_sum(gradient.contiguous())

        rows = tokens.flatten(0, -2)
        of_weights = [
            of_output.flatten(0, -2).t() @ rows if needed and of_output is not None else None
            for of_output, needed in zip(of_outputs, ctx.needs_input_grad[3:], strict=True)
        ]

        of_hidden = None if wait is None else wait().view(ctx.shape)
        return of_hidden, None, None, *of_weights


class _WithStandIn(torch.autograd.Function):
    """Return a layer's output; its gradient is also the gradient of the layer's stand-in."""

    @staticmethod
    def forward(ctx: FunctionCtx, output: Tensor, stand_in: Tensor) -> Tensor:
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


def _gather_logits(logits: Tensor, axis: Axis, size: int) -> Tensor:
    """Gather the logits of all shards of the vocabulary, [..., shard] -> [..., V].

    Their gradient is equal on all ranks.
    """
    rows = -(-size // axis.size)
    first = rows * axis.rank
    count = logits.shape[-1]

    def gather(logits: Tensor) -> Tensor:
        padded = F.pad(logits, (0, rows - count)) if count < rows else logits
        return all_gather_tensor(padded[None], axis).movedim(0, -2).flatten(-2)[..., :size]

    return with_gradient(logits, gather, lambda gradient: gradient[..., first : first + count])


def _split(model: PreTrainedModel, mesh: DeviceMesh, sequence: bool) -> None:
    """Split a model. With `sequence` the ranks divide the tokens of the residual stream [1, T, H].

    Where media replace embeddings between the embedding layer and the decoder, the decoder divides
    the tokens.
    """
    axis = Axis.of("tp", mesh.get_group())
    decoder = model.get_decoder()
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight

    for block in decoder.layers:
        fused = {name: Sections(sizes, axis) for name, sizes in _section_sizes(block).items()}
        for name, split in _block_plan(block, sequence=sequence, fused=fused).items():
            split(block.get_submodule(name), mesh)
        if "qkv_proj" in fused:
            _count_local_heads(block.self_attn, axis)

        layers = _present(block.self_attn, ATTENTION_INPUTS)
        _Branch(block.self_attn, layers, axis, fused, sequence=sequence)
        if _splits_feed_forward(block):
            layers = _present(block.mlp, FEED_FORWARD)
            _Branch(block.mlp, layers, axis, fused, sequence=sequence)

    inside = decoder is model.base_model
    _split_embedding(embedding, mesh, sequence=sequence and inside)
    if sequence and not inside:
        decoder.register_forward_pre_hook(partial(_divide_tokens, axis=axis), with_kwargs=True)

    if sequence:
        _replicate(decoder.norm, mesh)
        decoder.norm.register_forward_hook(
            lambda module, args, hidden: Gather.apply(axis, hidden[0])[0][None]
        )

    if head is not None:
        size = head.weight.shape[0]
        _split_columns(head, mesh)
        head.register_forward_pre_hook(
            lambda module, args: (copy_to_parallel_region(args[0], axis),)
        )
        head.register_forward_hook(lambda module, args, logits: _gather_logits(logits, axis, size))

    # Distributing made two parameters of them.
    if tied:
        head.weight = embedding.weight


def _divide_tokens(
    decoder: nn.Module, args: tuple, kwargs: dict[str, Any], *, axis: Axis
) -> tuple[tuple, dict[str, Any]]:
    """Keep this rank's tokens of a decoder's inputs: a forward pre-hook.

    The gradient of the inputs is summed over the ranks.
    """
    embedded = kwargs["inputs_embeds"]
    positions = torch.arange(embedded.shape[1], device=embedded.device).chunk(axis.size)[axis.rank]
    return args, kwargs | select_tokens(
        kwargs, positions, lambda values: copy_to_parallel_region(values, axis)
    )


def _present(module: nn.Module, names: Collection[str]) -> list[str]:
    """Return the names of layers that a module has."""
    return [name for name in names if name in module._modules]


def _section_sizes(block: nn.Module) -> dict[str, list[int]]:
    """Return the rows of each section of the fused layers of a block."""
    sizes = {}
    attention = block.self_attn
    if "qkv_proj" in attention._modules:
        values = attention.num_key_value_heads * attention.head_dim
        sizes["qkv_proj"] = [values * attention.num_key_value_groups, values, values]
    if "gate_up_proj" in block.mlp._modules:
        sizes["gate_up_proj"] = [block.mlp.gate_up_proj.out_features // 2] * 2
    return sizes


def _count_local_heads(attention: nn.Module, axis: Axis) -> None:
    """Let attention find queries, keys and values in this rank's outputs of a fused layer."""
    attention.num_key_value_heads //= axis.size
    attention.config = copy(attention.config)
    attention.config.num_attention_heads //= axis.size


def _block_plan(
    block: nn.Module, *, sequence: bool, fused: Mapping[str, Sections] = MappingProxyType({})
) -> dict[str, Split]:
    """Return how to split each module of a block that has parameters.

    The norms of queries and keys process this rank's heads, and with `sequence` the other norms
    process the rank's tokens. Experts are computed whole on each rank.
    """
    columns = partial(_split_columns, detached=("weight",))
    rows = partial(_split_rows, sequence=sequence)
    attention = block.self_attn
    linear: dict[str, Split] = {
        f"self_attn.{layer}": columns for layer in _present(attention, ATTENTION_INPUTS)
    }
    linear["self_attn.o_proj"] = rows
    plan: dict[str, Split] = {}
    if attention._parameters:
        plan["self_attn"] = _split_heads
    for name, norm in attention.named_children():
        if "norm" in name and norm.weight.numel() == attention.head_dim:
            plan[f"self_attn.{name}"] = _replicate
        elif type(norm).__name__ in NORMS_OF_ALL_HEADS:
            plan[f"self_attn.{name}"] = _split_norm

    if _splits_feed_forward(block):
        linear |= {f"mlp.{name}": columns for name in _present(block.mlp, FEED_FORWARD)}
        linear["mlp.down_proj"] = rows
    else:
        names = (name for name, child in block.mlp.named_modules(prefix="mlp") if child._parameters)
        plan |= dict.fromkeys(names, lambda module, mesh: None)

    if sequence:
        norms = (name for name, _ in block.named_children() if name.endswith("layernorm"))
        plan |= dict.fromkeys(norms, _replicate)
    for name, split in linear.items():
        sections = fused.get(name.rpartition(".")[2])
        if sections is not None:
            split = partial(_split_sections, sections=sections)
        plan |= _with_adapter(
            block, name, split, by_rows=split is rows, sections=sections, sequence=sequence
        )
    return plan


def _with_adapter(
    block: nn.Module,
    name: str,
    split: Split,
    *,
    by_rows: bool,
    sections: Sections | None,
    sequence: bool,
) -> dict[str, Split]:
    """Return how to split a linear layer, and the adapter that it may have.

    Of a layer divided by outputs, each rank has some rows of B and a summand of A's gradient. Of
    one divided by inputs, each has some columns of A, and the product with A is summed before B.
    """
    layer = block.get_submodule(name)
    if isinstance(layer, nn.Linear):
        return {name: split}

    (adapter,) = layer.scaling
    reduce = _scatter_tokens if sequence else _sum_in_place

    def split_a(matrix: nn.Module, mesh: DeviceMesh) -> None:
        distribute(matrix, mesh, weight=Shard(1) if by_rows else Replicate())
        if by_rows:
            b_gradient = Partial() if sequence else Replicate()
            axis = Axis.of("tp", mesh.get_group())
            layer.split = SplitAdapter(Shard(1), b_gradient, lambda low: reduce(low, axis))
        else:
            layer.split = SplitAdapter(Partial(), Shard(0), lambda low: low, sections)

    def split_b(matrix: nn.Module, mesh: DeviceMesh) -> None:
        distribute(matrix, mesh, weight=Replicate() if by_rows else Shard(0))

    return {
        f"{name}.base_layer": split,
        f"{name}.lora_A.{adapter}": split_a,
        f"{name}.lora_B.{adapter}": split_b,
    }


def _splits_feed_forward(block: nn.Module) -> bool:
    """Return whether a block has a feed-forward layer, and not experts."""
    return isinstance(getattr(block.mlp, "down_proj", None), nn.Module)


class _Branch:
    """Forward hooks that let attention or feed-forward sum the gradient of its input."""

    def __init__(
        self,
        module: nn.Module,
        layers: Collection[str],
        axis: Axis,
        fused: Mapping[str, Sections],
        *,
        sequence: bool,
    ) -> None:
        """Register the hooks at a branch and at those `layers` of it that read its input."""
        self.axis = axis
        self.sequence = sequence
        self.layers = [module.get_submodule(name) for name in layers]
        self.sections = [fused.get(name) for name in layers]
        self.stand_ins: dict[nn.Module, Tensor] = {}
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        for layer in self.layers:
            layer.register_forward_hook(self.stand_in)

    def enter(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        hidden = args[0] if args else kwargs["hidden_states"]
        learning = self.layers if torch.is_grad_enabled() else []
        weights = [
            layer.weight.to_local()
            if sections is None
            else with_gradient(layer.weight.to_local(), same, sections.stored)
            for layer, sections in zip(learning, self.sections, strict=bool(learning))
        ]
        tokens, *stand_ins = _EnterBranch.apply(hidden, self.axis, self.sequence, *weights)
        self.stand_ins = dict(zip(learning, stand_ins, strict=True))
        if args:
            return (tokens, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": tokens}

    def stand_in(self, layer: nn.Module, args: tuple, output: Tensor) -> Tensor:
        stand_in = self.stand_ins.pop(layer, None)
        return output if stand_in is None else _WithStandIn.apply(output, stand_in)


def _split_heads(attention: nn.Module, mesh: DeviceMesh) -> None:
    """Keep the parameters of this rank's heads: the sinks [H] of gpt-oss."""
    names = attention._parameters
    distribute(attention, mesh, **dict.fromkeys(names, Shard(0)))
    LocalParameters(attention)


def _split_columns(linear: nn.Module, mesh: DeviceMesh, *, detached: Collection[str] = ()) -> None:
    """Keep this rank's outputs of a layer; each rank computes them from the whole input."""
    distribute(linear, mesh, weight=Shard(0), bias=Shard(0))
    LocalParameters(linear, detached=detached)


def _split_sections(linear: nn.Linear, mesh: DeviceMesh, *, sections: Sections) -> None:
    """Keep consecutive rows of a fused layer without a bias; compute with shares of all."""
    distribute(linear, mesh, weight=Shard(0))
    LocalParameters(linear, detached=("weight",))
    linear.forward = lambda hidden: _linear_of_sections(hidden, linear.weight, sections)


def _split_rows(linear: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Keep this rank's inputs of a layer; the outputs are summed over the ranks.

    The bias is added to the sum.
    """
    axis = Axis.of("tp", mesh.get_group())
    reduce = _scatter_tokens if sequence else _sum_in_place
    distribute(linear, mesh, weight=Shard(1), bias=Replicate())
    LocalParameters(linear, hidden=("bias",))

    def reduce_output(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        reduced = reduce(output, axis)
        # Added before the sum, the bias would count once for each rank.
        if module.bias is None:
            return reduced
        return reduced + module.bias.to_local(
            grad_placements=[Partial() if sequence else Replicate()]
        )

    linear.register_forward_hook(reduce_output)


def _split_embedding(embedding: nn.Embedding, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Keep this rank's rows of an embedding layer, and sum the outputs over the ranks.

    The outputs of other rows are zero.
    """
    axis = Axis.of("tp", mesh.get_group())
    reduce = _scatter_tokens if sequence else _sum_in_place
    distribute(embedding, mesh, weight=Shard(0))
    shard = vocabulary_shard(embedding.weight)
    first = shard.first
    rows = len(shard.weight)
    # From now on the layer counts this rank's rows only.
    if embedding.padding_idx is not None:
        embedding.padding_idx = (
            embedding.padding_idx - first if first <= embedding.padding_idx < first + rows else None
        )
    LocalParameters(embedding)
    outside: Tensor

    def to_local_rows(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        nonlocal outside
        (ids,) = args
        outside = (ids < first) | (ids >= first + rows)
        return ((ids - first).masked_fill(outside, 0),)

    def reduce_output(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return reduce(output.masked_fill(outside[..., None], 0), axis)

    embedding.register_forward_pre_hook(to_local_rows)
    embedding.register_forward_hook(reduce_output)


def _replicate(norm: nn.Module, mesh: DeviceMesh) -> None:
    """Let each rank process its own shard of the input of a norm.

    The weight then has a partial gradient on each rank. As a DTensor the gradient is marked as
    partial, and FSDP sums it.
    """
    distribute(norm, mesh, weight=Replicate(), bias=Replicate())
    LocalParameters(norm, gradient=[Partial()])


def _split_norm(norm: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's shard of a norm of all heads; the mean of squares is that over all ranks."""
    axis = Axis.of("tp", mesh.get_group())
    size = norm.weight.numel()
    distribute(norm, mesh, weight=Shard(0))
    LocalParameters(norm)

    def forward(hidden: Tensor) -> Tensor:
        values = hidden.float()
        # Each rank uses the sum in another way, so the gradients add up too.
        squares = with_gradient(values.pow(2).sum(-1, keepdim=True), axis.sum, axis.sum)
        values = values * torch.rsqrt(squares / size + norm.variance_epsilon)
        return (norm.weight * values).to(hidden.dtype)

    norm.forward = forward


def distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Make DTensors of a module's parameters without communication: each rank keeps its own shard.

    Frozen ones stay frozen.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        tensor = distribute_tensor(parameter.data, mesh, [placements[name]], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=parameter.requires_grad))


@dataclass(eq=False)
class LocalParameters:
    """Forward hooks that let a module compute with this rank's shards of the parameters.

    The shards are plain tensors.
    """

    module: InitVar[nn.Module]
    gradient: list[Placement] | None = None
    """Placement of gradients; None: the parameter's."""
    hidden: Collection[str] = ()
    """Parameters that are None."""
    detached: Collection[str] = ()
    """Parameters that get no gradient from the module."""

    def __post_init__(self, module: nn.Module) -> None:
        """Register the hooks."""
        module.register_forward_pre_hook(self.replace)
        module.register_forward_hook(self.restore, always_call=True)

    def replace(self, module: nn.Module, args: tuple) -> None:
        self.distributed = module._parameters
        module._parameters = {
            name: self._local(name, parameter) for name, parameter in self.distributed.items()
        }

    def restore(self, module: nn.Module, args: tuple, output: Any) -> None:
        module._parameters = self.distributed

    def _local(self, name: str, parameter: DTensor | None) -> Tensor | None:
        if parameter is None or name in self.hidden:
            return None
        if name in self.detached:
            with torch.no_grad():
                return parameter.to_local()
        return parameter.to_local(grad_placements=self.gradient)
