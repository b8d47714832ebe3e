"""Zigzag: ranks divide the tokens, and attention gathers the keys and values of all.

Of 2 x ranks equal chunks of the batch, rank r has number r and the one as far from the end: an early one, whose queries see
little, and a late one, whose queries see much, so that all ranks have about as much to compute. Only keys and values are whole on
every rank, and their heads, unlike those of Ulysses, need not divide by the ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lightrft.parallel.sequence_parallel import Gather, SequenceParallel


class Zigzag(SequenceParallel):
    """Two chunks of the tokens on each rank; its own queries and everyone's keys and values in its attention."""

    chunks_per_rank = 2

    def chunks(self, rank: int) -> list[int]:
        return [rank, 2 * self.axis.size - 1 - rank]

    def queries(self, num_tokens: int) -> list[tuple[int, int]]:
        return self.spans(num_tokens)

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The query as it is; key and value [t, H, D] -> [T, H, D] in the order of the batch, in one gather."""
        (both,) = _GatherSummed.apply(self.axis, torch.cat([key, value], -1))
        return query, *self.in_order(both).split([key.shape[-1], value.shape[-1]], -1)


class _GatherSummed(Gather):
    """All ranks use the result differently, so the gradient is the sum over them."""

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, Tensor]:
        mine = gradient.new_empty(len(gradient) // ctx.axis.size, *gradient.shape[1:])
        dist.reduce_scatter_tensor(mine, gradient.contiguous(), group=ctx.axis.group)
        return None, mine
