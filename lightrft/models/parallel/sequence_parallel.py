"""Split the tokens of a flat batch over ranks, and combine the results with collectives.

Shapes: T tokens of the whole batch, t = T / ranks of one rank, H heads, D head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import PreTrainedModel

from lightrft.models.parallel.collectives import Axis, with_gradient


class SequenceParallel:
    """Split of the tokens of a batch over the ranks of an axis, one chunk each, in rank order.

    Base of Ulysses and Zigzag.
    """

    chunks_per_rank = 1
    splits_heads = True
    """Whether each rank computes all tokens of some heads, or else some tokens of all heads."""

    def __init__(self, axis: Axis | None = None, *, shards: int = 1):
        """Split over `axis`.

        A rank's tokens must also be divisible by `shards`, the number of ranks that split them
        between attentions.
        """
        self.axis = axis or Axis("sp", 1, 0, None)
        self.num_chunks = self.axis.size * self.chunks_per_rank
        self.multiple = lcm(self.num_chunks, self.axis.size * shards)
        """Number that the number of tokens must be a multiple of."""

    def chunks(self, rank: int) -> list[int]:
        """Return which of the `num_chunks` equal chunks of the batch a rank has, in order."""
        return [rank]

    def problems(self, num_heads: int) -> list[str]:
        """Return why a model with `num_heads` attention heads per rank cannot be split this way."""
        return []

    def spans(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return start and end of each chunk of this rank.

        Raise ValueError if `num_tokens` is no multiple of `multiple`.
        """
        if num_tokens % self.multiple:
            raise ValueError(
                f"{num_tokens} tokens are not a multiple of {self.multiple}, which {self.axis.size}"
                " ranks require"
            )
        size = num_tokens // self.num_chunks
        return [(chunk * size, (chunk + 1) * size) for chunk in self.chunks(self.axis.rank)]

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in the whole batch: [t] int64."""
        return torch.cat([torch.arange(*span, device=device) for span in self.spans(num_tokens)])

    def find_local(self, positions: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the indices of `positions` that belong to this rank, and the local tokens there.

        [m] int64 each.
        """
        indices = []
        local = []
        before = 0
        for start, end in self.spans(num_tokens):
            indices.append(((positions >= start) & (positions < end)).nonzero()[:, 0])
            local.append(positions[indices[-1]] - start + before)
            before += end - start
        return torch.cat(indices), torch.cat(local)

    def gather(self, values: Tensor) -> Tensor:
        """Gather values [t, ...] of each rank's tokens to [T, ...] of all tokens in order.

        The result is equal on all ranks. The gradient of a rank's values is its own slice: if all
        ranks compute the same loss, the sum of the resulting parameter gradients over the ranks is
        the gradient of that loss, counted once.
        """
        return self.gather_all(values)[0]

    def gather_all(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Gather several tensors of one shape and dtype in one collective.

        An unused result has no gradient, instead of zeros.
        """
        if self.axis.size == 1:
            return values
        return tuple(self.in_order(value) for value in Gather.apply(self.axis, *values))

    def sums(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Sum each tensor, of any shape, over the ranks; for gradients see gather_all()."""
        if self.axis.size == 1:
            return values
        gathered = Gather.apply(self.axis, *(value[None] for value in values))
        return tuple(each.sum(0) for each in gathered)

    def sum(self, values: Tensor) -> Tensor:
        """Sum one tensor over the ranks, as sums() does."""
        return self.sums(values)[0]

    def in_order(self, gathered: Tensor) -> Tensor:
        """Reorder values [T, ...] from rank order to the order of the batch."""
        numbers = [number for rank in range(self.axis.size) for number in self.chunks(rank)]
        if numbers == sorted(numbers):
            return gathered
        chunks = dict(zip(numbers, gathered.chunk(len(numbers)), strict=True))
        return torch.cat([chunks[number] for number in range(len(numbers))])

    def queries(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return start and end of the runs of tokens whose queries this rank has in attention.

        It has the keys of all tokens.
        """
        return [(0, num_tokens)]

    def before_attention(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Convert [t, H, D] of this rank's tokens to the inputs of the attention."""
        return query, key, value

    def split_heads(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Convert tensors [t, H, D] of this rank's tokens to those of all tokens and some heads.

        after_attention() is the inverse.
        """
        return values

    def local_heads(self, values: Tensor) -> Tensor:
        """Return the values [H] of the heads that this rank has in attention."""
        return values

    def after_attention(self, output: Tensor) -> Tensor:
        """Convert the output of the attention to [t, H, D] of this rank's tokens."""
        return output


class NoSequenceParallel(SequenceParallel):
    """Split for one rank that keeps all tokens."""

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        return torch.arange(num_tokens, device=device)

    def find_local(self, positions: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        return torch.arange(len(positions), device=positions.device), positions


NO_SEQUENCE_PARALLEL = NoSequenceParallel()


class SequenceParallelModule(nn.Module, ABC):
    """Module that computes flat batches with a transformers model.

    It splits them over the ranks of `sequence`.
    """

    sequence: SequenceParallel = NO_SEQUENCE_PARALLEL

    @property
    @abstractmethod
    def hf_model(self) -> PreTrainedModel:
        """Return the transformers model inside."""

    def hf_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under the Hugging Face names, tied ones once."""
        return self.hf_model.named_parameters()


def set_sequence_parallel(module: nn.Module, sequence: SequenceParallel, *, tp: int = 1) -> bool:
    """Split the batches of every SequenceParallelModule inside `module` over ranks.

    `tp` is the number of tensor-parallel ranks that split the attention heads. Return True if there
    is such a module: any other module is computed whole on each of these ranks. Raise ValueError,
    with all reasons, for a model that cannot be split.
    """
    divided = sequence.axis.size > 1
    name = "--tp_sequence_parallel"
    if divided:
        name = f"--sp_size {sequence.axis.size} --sp_impl {type(sequence).__name__.lower()}"

    submodules = [each for each in module.modules() if isinstance(each, SequenceParallelModule)]
    for submodule in submodules:
        model = submodule.hf_model
        problems = sequence.problems(model.config.get_text_config().num_attention_heads // tp)
        if model._is_stateful and not sequence.splits_heads:
            problems.append(
                "its recurrent state runs through all tokens of a sequence: use --sp_impl ulysses"
            )
        if problems:
            raise ValueError(
                f"{name} does not support {type(model).__name__}: {'; '.join(problems)}"
            )
        submodule.sequence = sequence

    return bool(submodules)


def select_tokens(
    inputs: Mapping[str, Any],
    positions: Tensor,
    shared: Callable[[Tensor], Tensor] = lambda values: values,
) -> dict[str, Any]:
    """Return a decoder's embeddings at the tokens `positions` [t], and what it adds to them.

    The inputs are [1, T, H]. `shared` is applied to the embeddings of all tokens, and to the
    features that the tower of Qwen3-VL adds in several layers.
    """
    selected = {"inputs_embeds": shared(inputs["inputs_embeds"])[:, positions]}
    if (is_visual := inputs.get("visual_pos_masks")) is not None:
        rows = (is_visual[0].cumsum(0) - 1)[positions][is_visual[0, positions]]
        selected["visual_pos_masks"] = is_visual[:, positions]
        selected["deepstack_visual_embeds"] = [
            shared(features)[rows] for features in inputs["deepstack_visual_embeds"]
        ]
    return selected


def all_gather_tensor(values: Tensor, axis: Axis) -> Tensor:
    """Gather [t, ...] of each rank to [T, ...] in rank order, without gradient."""
    if axis.size == 1:
        return values
    result = values.new_empty(axis.size * len(values), *values.shape[1:])
    dist.all_gather_into_tensor(result, values.contiguous(), group=axis.group)
    return result


def reduce_scatter_tensor(values: Tensor, axis: Axis) -> Tensor:
    """Sum [T, ...] over the ranks, and return this rank's [T / ranks, ...], without gradient."""
    return begin_reduce_scatter(values, axis)()


def begin_reduce_scatter(values: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Start reduce_scatter_tensor(), and return a function that waits for the result."""
    if axis.size == 1:
        return lambda: values
    values = values.contiguous()
    result = values.new_empty(len(values) // axis.size, *values.shape[1:])
    work = dist.reduce_scatter_tensor(result, values, group=axis.group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return result

    return wait


class Gather(torch.autograd.Function):
    """Gather of [t, ...] to [T, ...], in one collective if the tensors have one shape.

    All ranks use the result in the same way, so the gradient is a rank's own slice.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, axis: Axis, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.set_materialize_grads(False)
        if len({value.shape for value in values}) > 1 or len(values) == 1:
            return tuple(all_gather_tensor(value, axis) for value in values)
        return tuple(
            value.contiguous()
            for value in all_gather_tensor(torch.stack(values, 1), axis).unbind(1)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        axis = ctx.axis
        return None, *(g if g is None else g.chunk(axis.size)[axis.rank] for g in gradients)


def gather_summed(values: Tensor, axis: Axis) -> Tensor:
    """Gather [t, ...] to [T, ...], with a gradient that is summed over the ranks.

    Each rank uses the result differently.
    """
    gather = partial(all_gather_tensor, axis=axis)
    return with_gradient(values, gather, partial(reduce_scatter_tensor, axis=axis))
