"""Zigzag: ranks split the tokens, and attention gathers the keys and values of all tokens.

The batch has 2 x ranks equal chunks, and rank r has chunk r and chunk 2 x ranks - 1 - r. Queries of
an early chunk attend to few keys, and queries of a late one to many, so one of each balances the
work of the ranks. Only keys and values are gathered on every rank, and unlike in Ulysses the number
of heads need not be divisible by the number of ranks.
"""

import torch
from torch import Tensor

from lightrft.models.parallel.sequence_parallel import SequenceParallel, gather_summed


class Zigzag(SequenceParallel):
    """Split into two chunks per rank.

    The attention of each rank has its own queries, and the keys and values of all ranks.
    """

    chunks_per_rank = 2
    splits_heads = False

    def chunks(self, rank: int) -> list[int]:
        return [rank, 2 * self.axis.size - 1 - rank]

    def queries(self, num_tokens: int) -> list[tuple[int, int]]:
        return self.spans(num_tokens)

    def before_attention(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the query unchanged, and key and value [t, H, D] gathered to [T, H, D].

        They are in the order of the batch.
        """
        both = gather_summed(torch.cat([key, value], -1), self.axis)
        return query, *self.in_order(both).split([key.shape[-1], value.shape[-1]], -1)
