"""Which tokens of a flat batch a rank computes, and how the ranks of one sequence put their results together.

Shapes: T tokens of the whole batch, t = T / ranks of one rank, H heads, D their size.
"""

from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lightrft.parallel.collectives import Axis


class SequenceParallel:
    """Divide the tokens of a batch over the ranks of an axis: one chunk each, in their order. The base of Ulysses and Zigzag."""

    chunks_per_rank = 1

    def __init__(self, axis: Axis | None = None, *, parts: int = 1):
        """`parts`: a rank's tokens must divide by so many, too, because others keep parts of them between two attentions."""
        self.axis, self.parts = axis or Axis("sp", 1, 0, None), parts

    @property
    def num_chunks(self) -> int:
        return self.axis.size * self.chunks_per_rank

    @property
    def multiple(self) -> int:
        """What the number of tokens must be a multiple of."""
        return lcm(self.num_chunks, self.axis.size * self.parts)

    def chunks(self, rank: int) -> list[int]:
        """Which of the `num_chunks` equal chunks of the batch the rank has, in its order."""
        return [rank]

    def problems(self, num_heads: int) -> list[str]:
        """Why a model with so many attention heads on a rank cannot be run this way, all reasons at once."""
        return []

    def spans(self, num_tokens: int) -> list[tuple[int, int]]:
        """Begin and end of each chunk of this rank among `num_tokens` tokens. ValueError unless they are a multiple."""
        if num_tokens % self.multiple:
            raise ValueError(f"{num_tokens} tokens are not a multiple of {self.multiple}, as {self.axis.size} ranks need")
        size = num_tokens // self.num_chunks
        return [(chunk * size, (chunk + 1) * size) for chunk in self.chunks(self.axis.rank)]

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """[t] int64: the positions of this rank's tokens in the whole batch."""
        return torch.cat([torch.arange(*span, device=device) for span in self.spans(num_tokens)])

    def own(self, positions: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Which of these positions in the whole batch are of this rank's tokens, and where among these: [m] int64 each."""
        which, local, before = [], [], 0
        for start, end in self.spans(num_tokens):
            which.append(((positions >= start) & (positions < end)).nonzero()[:, 0])
            local.append(positions[which[-1]] - start + before)
            before += end - start
        return torch.cat(which), torch.cat(local)

    def gather(self, values: Tensor) -> Tensor:
        """Values [t, ...] of this rank's tokens -> [T, ...] of all tokens in their order, equal on all ranks.

        The gradient of a rank's values is its own slice: where all ranks compute the same loss, the sum over them of what
        follows is the gradient of that loss, once.
        """
        return self.gather_all(values)[0]

    def gather_all(self, *values: Tensor) -> tuple[Tensor, ...]:
        """gather() of several of one shape and dtype, in one collective. What is not used has no gradient, instead of zeros."""
        if self.axis.size == 1:
            return values
        return tuple(self.in_order(whole) for whole in Gather.apply(self.axis, *values))

    def sums(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Of what each rank has of its own tokens, in any shape, the sum; gradients as in gather_all()."""
        if self.axis.size == 1:
            return values
        return tuple(parts.sum(0) for parts in Gather.apply(self.axis, *(value[None] for value in values)))

    def sum(self, values: Tensor) -> Tensor:
        """sums() of one."""
        return self.sums(values)[0]

    def in_order(self, gathered: Tensor) -> Tensor:
        """[T, ...] as the ranks have them, one rank after the other -> in the order of the batch."""
        numbers = [number for rank in range(self.axis.size) for number in self.chunks(rank)]
        if numbers == sorted(numbers):
            return gathered
        chunks = dict(zip(numbers, gathered.chunk(len(numbers)), strict=True))
        return torch.cat([chunks[number] for number in range(len(numbers))])

    def queries(self, num_tokens: int) -> list[tuple[int, int]]:
        """Begin and end of the runs of tokens whose queries this rank has in attention; keys are those of all tokens."""
        return [(0, num_tokens)]

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[t, H, D] of this rank's tokens -> what its attention computes with."""
        return query, key, value

    def leave(self, output: Tensor) -> Tensor:
        """What its attention gave -> [t, H, D] of this rank's tokens."""
        return output


class NoSequenceParallel(SequenceParallel):
    """Keep all tokens on one rank."""


NO_SEQUENCE_PARALLEL = NoSequenceParallel()


def gathered(values: Tensor, axis: Axis) -> Tensor:
    """[t, ...] of each rank -> [T, ...], one rank after the other. No gradient."""
    if axis.size == 1:
        return values
    whole = values.new_empty(axis.size * len(values), *values.shape[1:])
    dist.all_gather_into_tensor(whole, values.contiguous(), group=axis.group)
    return whole


class Gather(torch.autograd.Function):
    """Each [t, ...] of every rank -> [T, ...]. All ranks use them alike, so a gradient is a rank's own slice."""

    @staticmethod
    def forward(ctx: FunctionCtx, axis: Axis, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.set_materialize_grads(False)
        if len(values) == 1:
            return (gathered(values[0], axis),)
        return tuple(whole.contiguous() for whole in gathered(torch.stack(values, 1), axis).unbind(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        size, rank = ctx.axis.size, ctx.axis.rank
        return None, *(None if gradient is None else gradient.chunk(size)[rank] for gradient in gradients)
