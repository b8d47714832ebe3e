"""Ulysses: ranks divide the tokens, and within attention the heads (arXiv 2309.14509).

Before attention every rank sends each other rank the heads that are that one's, of its own tokens; afterwards back. Between the
two each rank has all tokens of H / ranks heads, so attention itself is the one of an undivided batch.
"""

from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lightrft.parallel.collectives import Axis
from lightrft.parallel.sequence_parallel import SequenceParallel


class Ulysses(SequenceParallel):
    """Consecutive tokens on each rank; H / ranks heads of all tokens in its attention."""

    def problems(self, num_heads: int) -> list[str]:
        return head_problems(num_heads, self.axis.size)

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[t, H, D] -> [T, H / ranks, D] in one exchange; key and value have their own, possibly fewer, heads.

        Key-value heads that do not divide by the ranks are repeated until they do: each rank gets those that its queries ask.
        """
        copies = lcm(key.shape[1], self.axis.size) // key.shape[1]
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        parts = [self._by_rank(x) for x in (query, key, value)]
        mixed = _Exchange.apply(torch.cat([part.flatten(2) for part in parts], -1), self.axis).flatten(0, 1)
        whole = mixed.split([part[0, 0].numel() for part in parts], -1)
        return tuple(x.unflatten(-1, part.shape[2:]) for x, part in zip(whole, parts, strict=True))

    def leave(self, output: Tensor) -> Tensor:
        """[T, H / ranks, D] -> [t, H, D]."""
        return _Exchange.apply(output.unflatten(0, (self.axis.size, -1)), self.axis).transpose(0, 1).flatten(1, 2)

    def _by_rank(self, x: Tensor) -> Tensor:
        """[t, H, D] -> [ranks, t, H / ranks, D]."""
        return x.unflatten(1, (self.axis.size, -1)).transpose(0, 1)


def head_problems(num_heads: int, sp: int) -> list[str]:
    if num_heads % sp == 0:
        return []
    return [f"sp_size {sp} does not divide its {num_heads} attention heads (--sp_impl zigzag needs no such thing)"]


class _Exchange(torch.autograd.Function):
    """[ranks, ...]: entry r goes to rank r, and becomes what rank r sent here. Its gradient goes back the same way."""

    @staticmethod
    def forward(ctx: FunctionCtx, parts: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_to_all(parts, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.axis), None


def _all_to_all(parts: Tensor, axis: Axis) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=axis.group)
    return received
