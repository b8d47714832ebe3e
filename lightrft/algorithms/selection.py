"""Select the largest of many values that are spread over ranks.

The result is the same for every distribution. Only counts are exchanged: the k-th largest key is
found eight bits at a time, from the highest down.
"""

import torch
from torch import Tensor

from lightrft.core.batch import Batch
from lightrft.core.losses import Sum
from lightrft.models.logits.truncation import float_keys

BYTE = 256
ROUNDED_BITS = 10
POSITION_BITS = 24
"""Bits of a row, and of a position in a sequence; both are below 2^24."""


def top_share(values: Tensor, share: float, batch: Batch, total: Sum) -> Tensor:
    """Return [T] bool: the share of all learned tokens with the largest values [T].

    With the entropy as values these are the forking tokens of reasoning. Wang et al., arXiv
    2506.01939, use a fifth of all tokens.
    """
    keys = rounded(values, batch.loss_mask, total)
    count = share_of_tokens(share, batch, total)
    return largest(keys, batch.loss_mask, count, batch, total)


def rounded(values: Tensor, mask: Tensor, total: Sum) -> Tensor:
    """Round the values [T] to about a thousandth of the mean size of the masked ones of all ranks.

    The last bits of a log-prob depend on what is computed together. After rounding, tokens in the
    same state, such as the first ones of a group, have equal values in all micro-batches. The unit
    is a power of two, so it does not depend on these bits either.
    """
    learned = values[mask].double()
    size, count = total(torch.stack([learned.abs().sum(), mask.sum(dtype=torch.float64)]))
    unit = torch.exp2((size / count).log2().floor() - ROUNDED_BITS)
    return torch.where(unit > 0, (values.double() / unit).round() * unit, values.double())


def share_of_tokens(share: float, batch: Batch, total: Sum) -> int:
    """Return how many tokens this share of all ranks' learned tokens is.

    It is at least one if there are any.
    """
    count = int(total(batch.loss_mask.sum()))
    return min(max(int(share * count + 1e-6), 1), count)


def largest(values: Tensor, mask: Tensor, count: int, batch: Batch, total: Sum) -> Tensor:
    """Return [T] bool: the `count` largest masked values [T] of all ranks.

    Among equal values the first rows and tokens win.
    """
    if count < 1:
        return torch.zeros_like(mask)
    keys = value_keys(values)
    threshold, still_wanted = kth_largest(keys[mask], count, 32, total)
    chosen = mask & (keys > threshold)
    tied = mask & (keys == threshold)
    order = -position_keys(batch) + (1 << 2 * POSITION_BITS) - 1
    last, _ = kth_largest(order[tied], still_wanted, 2 * POSITION_BITS, total)
    return chosen | (tied & (order >= last))


def kth_largest(keys: Tensor, k: int, bits: int, total: Sum) -> tuple[int, int]:
    """Return the k-th largest of all ranks' keys of `bits` bits.

    The second result is how many keys equal to it are among the k largest. If there are fewer than
    k keys, return the smallest of them, with all that are equal to it.
    """
    key = 0
    for shift in range(bits - 8, -1, -8):
        candidates = keys[(keys >> (shift + 8)) == (key >> (shift + 8))]
        counts = total(torch.bincount((candidates >> shift) & (BYTE - 1), minlength=BYTE))
        from_above = counts.flip(0).cumsum(0).flip(0)  # [256], keys of this byte or a larger one
        byte = max(int((from_above >= k).sum()) - 1, 0)
        k -= int(from_above[byte] - counts[byte])
        key |= byte << shift
    return key, k


def value_keys(values: Tensor) -> Tensor:
    """Return non-negative integers of 32 bits in the order of the values, [T] int64."""
    return float_keys(values.float()) + (1 << 31)


def position_keys(batch: Batch) -> Tensor:
    """Combine row and position of each token in one number, unique over all ranks: [T] int64."""
    return (batch.rows[batch.sequence_ids] << POSITION_BITS) + batch.position_ids
