"""Ulysses: ranks split the tokens, and within attention the heads (arXiv 2309.14509).

An all-to-all before attention gives each rank all tokens of H / ranks heads, so attention itself is
the same as for a whole batch; an all-to-all after attention undoes the exchange.
"""

from functools import partial
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.models.parallel.collectives import Axis, with_gradient
from lightrft.models.parallel.sequence_parallel import SequenceParallel


class Ulysses(SequenceParallel):
    """Split into consecutive tokens.

    The attention of each rank has H / ranks heads of all tokens.
    """

    def problems(self, num_heads: int) -> list[str]:
        return head_problems(num_heads, self.axis.size)

    def before_attention(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange [t, H, D] for [T, H / ranks, D] in one all-to-all.

        Key and value may have fewer heads. They are repeated until the number of ranks divides
        them, so that each rank gets the ones that the rank's queries use.
        """
        copies = lcm(key.shape[1], self.axis.size) // key.shape[1]
        if copies > 1:
            key = key.repeat_interleave(copies, 1)
            value = value.repeat_interleave(copies, 1)

        return self.split_heads(query, key, value)

    def split_heads(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Exchange tensors [t, H, D] of one dtype for [T, H / ranks, D] in one all-to-all."""
        # Heads are grouped by rank: [ranks, t, H / ranks, D].
        grouped = [x.unflatten(1, (self.axis.size, -1)).transpose(0, 1) for x in values]
        joined = torch.cat([tensor.flatten(2) for tensor in grouped], -1)
        mixed = _exchanged(joined, self.axis).flatten(0, 1)
        exchanged = mixed.split([tensor[0, 0].numel() for tensor in grouped], -1)

        return tuple(
            x.unflatten(-1, tensor.shape[2:]) for x, tensor in zip(exchanged, grouped, strict=True)
        )

    def local_heads(self, values: Tensor) -> Tensor:
        return values.chunk(self.axis.size)[self.axis.rank]

    def after_attention(self, output: Tensor) -> Tensor:
        """Exchange [T, H / ranks, D] for [t, H, D]."""
        exchanged = _exchanged(output.unflatten(0, (self.axis.size, -1)), self.axis)
        return exchanged.transpose(0, 1).flatten(1, 2)


def head_problems(num_heads: int, sp: int) -> list[str]:
    if num_heads % sp == 0:
        return []
    return [
        f"sp_size {sp} does not divide its {num_heads} attention heads (--sp_impl zigzag has no"
        " such condition)"
    ]


def _exchanged(chunks: Tensor, axis: Axis) -> Tensor:
    """Exchange [ranks, ...]: entry r is sent to rank r and replaced by the entry from rank r.

    So is the gradient.
    """
    exchange = partial(_all_to_all, axis=axis)
    return with_gradient(chunks, exchange, exchange)


def _all_to_all(chunks: Tensor, axis: Axis) -> Tensor:
    chunks = chunks.contiguous()
    received = torch.empty_like(chunks)
    dist.all_to_all_single(received, chunks, group=axis.group)
    return received
