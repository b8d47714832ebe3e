"""Triton kernels for log-probs and merged adapters.

local_sums() and gradient() are the steps after the product with the head's weight, each in one pass
over the logits. They return the same values as the functions of these names in vocab_parallel.py;
torch needs about ten passes for them. The first pass does not modify the logits, so the gradient is
computed from them. One program reads one row in the first pass, and one block of a row in the
second.

merge() returns what merge() of peft.py returns, without a copy of the matrix in float32.

Shapes: t tokens, v of the vocabulary on this rank, K targets at each position.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightrft.models.logits.vocab_parallel import Distribution, LocalTargets

BLOCK = 2048
MERGED_ROWS = 32
MERGED_COLUMNS = 128
MERGED_RANK = 16
"""Tile of merge(), and the slice of the rank that it multiplies at once."""


def local_sums(logits: Tensor, local_targets: LocalTargets) -> tuple[Tensor, ...]:
    """Return what the log-probs of some rows need; see vocab_parallel.local_sums().

    That is the largest logit [t], the sum of exponentials relative to it [t], the first moment
    [t], and target logits [t, K]. The `logits` [t, v] float32 are not modified; some may be -inf.
    """
    top, total, moment = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    _sums[(len(logits),)](
        logits, top, total, moment, logits.shape[1], logits.stride(0), BLOCK=BLOCK, num_warps=8
    )
    return top, total, moment, local_targets.pick(logits)


def gradient(
    logits: Tensor,
    distribution: Distribution,
    local_targets: LocalTargets,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the logits [t, v] in `dtype`, computed in float32.

    A float32 gradient overwrites the logits. With p the softmax: d log p_k / dz = onehot_k - p, and
    d entropy / dz = -p (log p + entropy).
    """
    out = logits if dtype == torch.float32 else torch.empty_like(logits, dtype=dtype)
    rows = [grad_logprobs.sum(-1), distribution.largest, distribution.total]
    # Without a gradient of the entropy the kernel reads neither of the last two: any tensor will
    # do.
    rows += (
        [distribution.total] * 2 if grad_entropy is None else [distribution.entropy, grad_entropy]
    )
    asked_for = torch.where(local_targets.is_local, local_targets.columns, -1), grad_logprobs
    _gradient[(len(logits), triton.cdiv(logits.shape[1], BLOCK))](
        logits,
        out,
        *(each.contiguous() for each in (*asked_for, *rows)),
        logits.shape[1],
        logits.stride(0),
        out.stride(0),
        local_targets.ids.shape[1],
        BY_ENTROPY=grad_entropy is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )

    return out


def merge(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return W + s B A [out, in] in bfloat16, rounded in the same way as by merge() of peft.py."""
    weight = weight.contiguous()
    a = a.contiguous()
    b = b.contiguous()
    out = torch.empty_like(weight)
    height, width = weight.shape
    grid = (triton.cdiv(height, MERGED_ROWS), triton.cdiv(width, MERGED_COLUMNS))
    tile = {"ROWS": MERGED_ROWS, "COLUMNS": MERGED_COLUMNS, "RANK": MERGED_RANK}
    _merge[grid](weight, a, b, out, scaling, height, width, a.shape[0], **tile, num_warps=4)
    return out


@triton.jit
def _threshold(number, SEED: tl.constexpr):
    """Return thresholds() of peft.py for some numbers."""
    mixed = (number * 2 + SEED).to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 16)) * 0x846CA68B
    return mixed >> 16


@triton.jit
def _merge(
    weight,
    a,
    b,
    out,
    scaling,
    height,
    width,
    rank,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    """Merge one tile. Every tile and call sums products in the same order."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < height)[:, None] & (column < width)[None, :]
    offsets = row.to(tl.int64)[:, None] * width + column[None, :]
    frozen = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)

    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rank, RANK):
        k = first + tl.arange(0, RANK)
        of_row = row.to(tl.int64)[:, None] * rank + k[None, :]
        left = tl.load(b + of_row, mask=(row < height)[:, None] & (k < rank)[None, :], other=0.0)
        of_column = k[:, None] * width + column[None, :]
        right = tl.load(
            a + of_column, mask=(k < rank)[:, None] & (column < width)[None, :], other=0.0
        )
        product = tl.dot(left.to(tl.float32), right.to(tl.float32), product, input_precision="ieee")
    merged = frozen + scaling * product

    threshold = (_threshold(row, 1)[:, None] + _threshold(column, 2)[None, :]) & 0xFFFF
    bits = merged.to(tl.uint32, bitcast=True) + threshold
    rounded = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(out + offsets, rounded, mask=inside)


@triton.jit
def _sums(logits, top, total, moment, num, stride, BLOCK: tl.constexpr):
    """Sum the exponentials of one row: largest logit, sum and moment.

    Each lane sums its own columns, and the lanes are combined at the end. Lowering the exponents by
    d turns a sum into exp(-d) * sum and its moment m into exp(-d) * (m - d * sum). All terms of a
    moment are at most 0, so none cancels.
    """
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    columns = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)

    sums = tl.zeros((BLOCK,), tl.float32)
    moments = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num, BLOCK):
        x = tl.load(start + first + columns, mask=first + columns < num, other=float("-inf"))
        higher = tl.maximum(largest, x)
        # -inf minus -inf is NaN.
        lower = tl.where(largest == float("-inf"), 0.0, largest - higher)
        below = tl.where(x == float("-inf"), 0.0, x - higher)
        weight = tl.where(x == float("-inf"), 0.0, tl.exp(below))
        factor = tl.exp(lower)
        moments = factor * (moments + lower * sums) + weight * below
        sums = factor * sums + weight
        largest = higher

    highest = tl.max(largest, axis=0)
    lower = tl.where(largest == float("-inf"), 0.0, largest - highest)
    factor = tl.exp(lower)
    tl.store(top + row, highest)
    tl.store(total + row, tl.sum(factor * sums, axis=0))
    tl.store(moment + row, tl.sum(factor * (moments + lower * sums), axis=0))


@triton.jit
def _gradient(
    logits,
    out,
    targets,
    grad_logprobs,
    asked_for,
    largest,
    total,
    entropy,
    grad_entropy,
    num,
    stride,
    out_stride,
    num_targets,
    BY_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        logits + row.to(tl.int64) * stride + columns, mask=columns < num, other=float("-inf")
    )
    below = tl.where(x == float("-inf"), 0.0, x - tl.load(largest + row))
    row_total = tl.load(total + row)
    p = tl.where(x == float("-inf"), 0.0, tl.exp(below) / row_total)
    upstream = tl.load(asked_for + row)

    if BY_ENTROPY:
        upstream += (below - tl.log(row_total) + tl.load(entropy + row)) * tl.load(
            grad_entropy + row
        )

    gradient = -p * upstream
    for k in range(num_targets):
        target = tl.load(targets + row * num_targets + k)
        gradient += tl.where(columns == target, tl.load(grad_logprobs + row * num_targets + k), 0.0)

    tl.store(
        out + row.to(tl.int64) * out_stride + columns,
        gradient.to(out.dtype.element_ty),
        mask=columns < num,
    )
