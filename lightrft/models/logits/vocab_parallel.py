"""Token distributions over a vocabulary that may be split over ranks.

For each row of logits a rank keeps the largest, the sum of exponentials relative to it, the first
moment, and the logits of the targets on the rank. Two collectives combine them, whatever the
number of chunks: the maximum, then all sums at once. The gradient of the logits needs none.

Shapes: T tokens, t of one chunk, V vocabulary, v of it on this rank, K targets at each position.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lightrft.models.logits.truncation import HOST_BLOCK, Truncation
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.device import exponentials
from lightrft.models.parallel.sequence_parallel import all_gather_tensor

SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class VocabularyRange:
    """Range of consecutive token ids that this rank of the axis holds.

    It is the whole vocabulary if the axis has one rank.
    """

    first: int
    num: int
    axis: Axis

    @classmethod
    def full(cls, num: int) -> "VocabularyRange":
        return cls(0, num, Axis("tp", 1, 0, None))


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of each row over the vocabulary of all ranks.

    It is restricted to the tokens that a truncation keeps.
    """

    logprobs: Tensor
    """Log-probs of the targets [T, K], 0 for ignored ones."""
    entropy: Tensor | None
    """Entropy [T]; None if not requested."""
    largest: Tensor
    """Largest logit [T]."""
    total: Tensor
    """Sum of the exponentials relative to the largest logit [T].

    It is kept separately, because a combined log-sum-exp would lose as many digits as the largest
    logit has.
    """
    scale: Tensor
    """Factor [T] from an exponential relative to this rank's largest logit to a probability."""

    def rows(self, rows: slice) -> "Distribution":
        values = (getattr(self, each.name) for each in fields(self))
        return Distribution(*(None if value is None else value[rows] for value in values))


class LocalTargets:
    """Targets [T, K] located in this rank's range of the vocabulary; negative ones are ignored."""

    def __init__(self, ids: Tensor, local_vocab: VocabularyRange):
        self.ids = ids
        self.local_vocab = local_vocab
        self.is_local = (ids >= local_vocab.first) & (ids < local_vocab.first + local_vocab.num)
        self.columns = torch.where(self.is_local, ids - local_vocab.first, 0)

    def rows(self, rows: slice) -> "LocalTargets":
        return LocalTargets(self.ids[rows], self.local_vocab)

    def pick(self, logits: Tensor) -> Tensor:
        """Return the logits of the targets, [T, v] -> [T, K], 0 for targets on other ranks."""
        if not self.local_vocab.num:
            return torch.zeros_like(self.is_local, dtype=torch.float32)
        return torch.where(self.is_local, logits.gather(-1, self.columns), 0.0)

    def add(self, gradient: Tensor, values: Tensor) -> Tensor:
        """Add `values` [T, K] to the gradient [T, v] at the columns of the targets."""
        if not self.local_vocab.num:
            return gradient
        return gradient.scatter_add_(-1, self.columns, torch.where(self.is_local, values, 0.0))

    def local_ids(self) -> Tensor:
        """Return the columns [T, K] of the targets; no truncation removes these.

        Targets on other ranks have `local_vocab.num`.
        """
        return torch.where(self.is_local, self.columns, self.local_vocab.num)


def outside(logits: Tensor, truncation: Truncation, local_targets: LocalTargets) -> Tensor:
    """Return a mask [t, v] bool of the truncated tokens.

    It is decided on whole rows, which the ranks divide among themselves.
    """
    vocab = local_targets.local_vocab
    if vocab.axis.size == 1:
        threshold = truncation.threshold(logits)
    elif truncation.ranks:
        threshold = _threshold(logits, truncation, vocab.axis)
    else:
        threshold = truncation.threshold(logits, first=vocab.first)
        if truncation.min_p > 0:
            threshold = vocab.axis.max(threshold)
    return truncation.outside(logits, threshold, first=vocab.first, keep=local_targets.local_ids())


def _threshold(logits: Tensor, truncation: Truncation, axis: Axis) -> Tensor:
    """Return the smallest logit that is kept in each row, [t, 1].

    `logits` [t, v] are this rank's columns of all rows.
    """
    num_rows = -(-len(logits) // axis.size)
    padded = torch.nn.functional.pad(logits, (0, 0, 0, num_rows * axis.size - len(logits)))
    columns = torch.cat(axis.exchange([piece.T.contiguous() for piece in padded.split(num_rows)])).T
    return all_gather_tensor(truncation.threshold(columns.contiguous()), axis)[: len(logits)]


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a mask [t, v] bool into bits [t, ceil(v / 8)] uint8.

    Bit i of all bytes holds the i-th eighth of the columns.
    """
    width = packed_width(mask.shape[-1])
    bits = torch.zeros(len(mask), width, dtype=torch.uint8, device=mask.device)
    for bit, columns in enumerate(mask.split(max(width, 1), -1)):
        bits[:, : columns.shape[-1]] |= columns.to(torch.uint8) << bit
    return bits


def packed_width(num_columns: int) -> int:
    return -(-num_columns // 8)


def fill_packed(logits: Tensor, bits: Tensor, value: float) -> Tensor:
    """Write `value` to the logits [t, v] where pack_mask() has set the bit in `bits`."""
    for bit, columns in enumerate(logits.split(max(bits.shape[-1], 1), -1)):
        columns.masked_fill_((bits[:, : columns.shape[-1]] & (1 << bit)) > 0, value)
    return logits


def local_sums(
    logits: Tensor, local_targets: LocalTargets, *, masked: bool, entropy: bool
) -> tuple[Tensor, ...]:
    """Return what this rank contributes to the log-probs of some rows.

    That is the largest logit [t], the sum of exponentials relative to it [t], the first moment
    [t], and target logits [t, K]. The exponentials overwrite the `logits` [t, v]. `masked` says
    that some logits may be -inf. Only the `entropy` needs the moment, and without it the moment is
    0.
    """
    picked = local_targets.pick(logits)
    if not local_targets.local_vocab.num:
        zeros = torch.zeros(len(logits), device=logits.device)
        return zeros - torch.inf, zeros, zeros, picked

    in_blocks = blocks(logits)
    # Memory of their own for all blocks would be paged in once for each.
    scratch = torch.empty_like(in_blocks[0]) if entropy else None
    sums = []
    for block in in_blocks:
        top = block.amax(-1)
        # At most 0, so nothing overflows and no digits of the entropy cancel. All logits of a row
        # may be -inf.
        below = block if scratch is None else scratch[: len(block)]
        torch.sub(block, torch.where(top.isneginf(), 0.0, top)[:, None], out=below)
        weights = exponentials(below, out=block)
        total = weights.sum(-1)

        if scratch is None:
            moment = torch.zeros_like(top)
        else:
            moment = (finite(below) if masked else below).mul_(weights).sum(-1)
        sums.append((top, total, moment))

    return *(torch.cat(values) for values in zip(*sums, strict=True)), picked


def blocks(logits: Tensor) -> tuple[Tensor, ...]:
    """Split the rows of `logits` [t, v] into blocks.

    On a host a block has as many rows as stay in the cache from pass to pass.
    """
    if logits.device.type != "cpu":
        return logits.split(max(1, len(logits)))
    return logits.split(max(1, HOST_BLOCK // max(1, logits.shape[-1])))


def finite(values: Tensor) -> Tensor:
    """Replace -inf by 0 in place: the probability is 0, and the product of both would be NaN."""
    return values.nan_to_num_(nan=torch.nan, neginf=0.0)


def join_sums(
    sums_of_chunks: list[tuple[Tensor, ...]], local_targets: LocalTargets, *, entropy: bool
) -> Distribution:
    """Combine the local_sums() of all chunks and ranks.

    A target that no rank has gets NaN, so that it is not overlooked.
    """
    ids = local_targets.ids
    axis = local_targets.local_vocab.axis
    if not sums_of_chunks:
        empty = torch.zeros(0, device=ids.device)
        return Distribution(empty.view(ids.shape), empty if entropy else None, *[empty] * 3)

    top, total, moment, picked = (torch.cat(values) for values in zip(*sums_of_chunks, strict=True))
    largest = axis.max(top)
    lower = torch.where(top.isneginf(), 0.0, top - largest)  # at most 0
    scale = lower.exp()
    at_largest = torch.where(local_targets.is_local, picked - largest[:, None], 0.0)
    totals = (total * scale)[:, None]
    moments = ((moment + total * lower) * scale)[:, None]
    sums = torch.cat([totals, moments, at_largest, local_targets.is_local], dim=1)
    total, moment, picked, num_owners = axis.sum(sums).tensor_split([1, 2, 2 + ids.shape[1]], dim=1)
    log_total = total.log()
    logprobs = torch.where(ids < 0, 0.0, torch.where(num_owners > 0, picked - log_total, torch.nan))
    entropies = (log_total - moment / total)[:, 0] if entropy else None

    return Distribution(logprobs, entropies, largest, total[:, 0], scale / total[:, 0])


def gradient(
    logits: Tensor, distribution: Distribution, grad_logprobs: Tensor, grad_entropy: Tensor | None
) -> Tensor:
    """Return the gradient of the logits [t, v] without the onehot_k terms of the targets.

    It overwrites the logits. With p the softmax: d log p_k / dz = onehot_k - p, and d entropy / dz
    = -p (log p + entropy).
    """
    in_blocks = blocks(logits)
    scratch = None if grad_entropy is None else torch.empty_like(in_blocks[0])
    start = 0
    for block in in_blocks:
        rows = slice(start, start + len(block))
        upstream = grad_logprobs[rows], None if grad_entropy is None else grad_entropy[rows]
        _block_gradient(block, distribution.rows(rows), *upstream, scratch)
        start = rows.stop
    return logits


def _block_gradient(
    logits: Tensor,
    distribution: Distribution,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    scratch: Tensor | None,
) -> None:
    asked_for = grad_logprobs.sum(-1, keepdim=True)
    below = logits if scratch is None else scratch[: len(logits)]
    torch.sub(logits, distribution.largest[:, None], out=below)
    weights = exponentials(below, out=logits)
    total = distribution.total[:, None]
    if grad_entropy is None:
        weights.mul_(-asked_for / total)
        return

    slope = -grad_entropy[:, None] / total
    factor = slope * (distribution.entropy[:, None] - total.log()) - asked_for / total
    weights.mul_(finite(below).mul_(slope).add_(factor))


def gradient_of_exponentials(
    exponentials: Tensor,
    distribution: Distribution,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return what gradient() returns, from the exponentials [t, v] of local_sums().

    It overwrites them. The logarithm of an exponential recovers the exponent up to the rounding of
    the exponential, wherever that is not negligible.
    """
    asked_for = grad_logprobs.sum(-1, keepdim=True)
    scale = distribution.scale[:, None]
    if grad_entropy is None:
        return exponentials.mul_(-asked_for * scale)

    slope = -grad_entropy[:, None] * scale
    factor = slope * (finite(scale.log()) + distribution.entropy[:, None]) - asked_for * scale
    in_blocks = blocks(exponentials)
    scratch = torch.empty_like(in_blocks[0])
    start = 0
    for block in in_blocks:
        rows = slice(start, start + len(block))
        # xlogy() takes three times as long. The logarithm of 0 must not be infinite.
        logs = torch.clamp(block, min=SMALLEST, out=scratch[: len(block)]).log_()
        block.mul_(logs.mul_(slope[rows]).add_(factor[rows]))
        start = rows.stop

    return exponentials
