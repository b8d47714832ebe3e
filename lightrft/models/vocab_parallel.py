"""The distribution of a token where each rank holds a part of the vocabulary, and the parts joined; one part may be all of it.

A rank keeps of each row of logits the largest, the sum of exponentials relative to it, their first moment, and the logits asked
for if they are here. Two collectives join them, whatever the number of chunks: the largest, then all sums at once. The
gradient of the logits needs none.

Shapes: T tokens, t of one chunk, V vocabulary, v of it here, K tokens asked for at each position.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lightrft.algorithms.truncation import HOST_BLOCK, Truncation
from lightrft.parallel.collectives import Axis
from lightrft.parallel.sequence_parallel import gathered


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Consecutive tokens of a vocabulary, which this rank of the axis has; all of them where the axis has one rank."""

    first: int
    num: int
    axis: Axis

    @classmethod
    def whole(cls, num: int) -> "VocabularyPart":
        return cls(0, num, Axis("tp", 1, 0, None))


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of each row over the vocabulary of all ranks, of the part that a truncation leaves."""

    logprobs: Tensor
    """[T, K], 0 for what is not asked for."""
    entropy: Tensor | None  # [T]; None where it was not asked for
    largest: Tensor
    """[T], of the logits."""
    total: Tensor
    """[T], sum of the exponentials relative to the largest. Apart from it, since their sum in one number would lose as many
    digits as the largest has."""
    scale: Tensor
    """[T]: a probability is an exponential relative to this rank's largest times this."""

    def rows(self, rows: slice) -> "Distribution":
        values = (getattr(self, each.name) for each in fields(self))
        return Distribution(*(None if value is None else value[rows] for value in values))


class LocalTargets:
    """Locate the targets [T, K] in this rank's part of the vocabulary; negative ones are ignored."""

    def __init__(self, ids: Tensor, part: VocabularyPart):
        self.ids, self.part = ids, part
        self.here = (ids >= part.first) & (ids < part.first + part.num)
        self.places = torch.where(self.here, ids - part.first, 0)

    def rows(self, rows: slice) -> "LocalTargets":
        return LocalTargets(self.ids[rows], self.part)

    def pick(self, logits: Tensor) -> Tensor:
        """[T, v] -> [T, K], 0 for what is elsewhere."""
        if not self.part.num:
            return torch.zeros_like(self.here, dtype=torch.float32)
        return torch.where(self.here, logits.gather(-1, self.places), 0.0)

    def add(self, gradient: Tensor, values: Tensor) -> Tensor:
        """Add `values` [T, K] to the gradient [T, v] where they belong."""
        if not self.part.num:
            return gradient
        return gradient.scatter_add_(-1, self.places, torch.where(self.here, values, 0.0))

    def kept(self) -> Tensor:
        """[T, K] places of the tokens that no truncation leaves out; `part.num` for what is elsewhere."""
        return torch.where(self.here, self.places, self.part.num)


def outside(logits: Tensor, truncation: Truncation, local_targets: LocalTargets) -> Tensor:
    """[t, v] bool: the tokens that the truncation leaves out, decided on whole rows, which the ranks divide among them."""
    part = local_targets.part
    threshold = truncation.threshold(logits) if part.axis.size == 1 else _threshold(logits, truncation, part.axis)
    return truncation.outside(logits, threshold, first=part.first, kept=local_targets.kept())


def _threshold(logits: Tensor, truncation: Truncation, axis: Axis) -> Tensor:
    """The smallest logit that stays, [t, 1], from this rank's columns [t, v] of all ranks' rows."""
    each = -(-len(logits) // axis.size)
    padded = torch.nn.functional.pad(logits, (0, 0, 0, each * axis.size - len(logits)))
    whole = torch.cat(axis.exchange([part.T.contiguous() for part in padded.split(each)])).T
    return gathered(truncation.threshold(whole.contiguous()), axis)[: len(logits)]


def packed(mask: Tensor) -> Tensor:
    """[t, v] bool -> [t, ceil(v / 8)] uint8, a bit for each. The first eighth of the columns are the first bits, and so on."""
    width = packed_width(mask.shape[-1])
    bits = torch.zeros(len(mask), width, dtype=torch.uint8, device=mask.device)
    for place, part in enumerate(mask.split(max(width, 1), -1)):
        bits[:, : part.shape[-1]] |= part.to(torch.uint8) << place
    return bits


def packed_width(num_columns: int) -> int:
    return -(-num_columns // 8)


def fill_packed(logits: Tensor, bits: Tensor, value: float) -> Tensor:
    """Write `value` into the logits [t, v] whose bit of packed() is set."""
    for place, part in enumerate(logits.split(max(bits.shape[-1], 1), -1)):
        part.masked_fill_((bits[:, : part.shape[-1]] & (1 << place)) > 0, value)
    return logits


def local_sums(logits: Tensor, local_targets: LocalTargets, *, holes: bool, entropy: bool) -> tuple[Tensor, ...]:
    """The largest logit [t], sum of exponentials relative to it [t], their first moment [t], the logits asked for [t, K].

    The exponentials take the place of the `logits` [t, v]. `holes`: some of the logits may be -inf. Only the `entropy` needs the
    moment, which is 0 without it.
    """
    picked = local_targets.pick(logits)
    if not local_targets.part.num:
        nothing = torch.zeros(len(logits), device=logits.device)
        return nothing - torch.inf, nothing, nothing, picked
    sums = [_block_sums(block, holes, entropy) for block in blocks(logits)]
    return *(torch.cat(values) for values in zip(*sums, strict=True)), picked


def _block_sums(logits: Tensor, holes: bool, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    top = logits.amax(-1)
    # At most 0, so nothing overflows and the entropy does not cancel. All of a part may be -inf.
    below = logits.sub_(torch.where(top.isneginf(), 0.0, top)[:, None])
    if not entropy:
        return top, below.exp_().sum(-1), torch.zeros_like(top)
    moments = without_holes(below.clone()) if holes else below.clone()
    weights = below.exp_()
    return top, weights.sum(-1), moments.mul_(weights).sum(-1)


def blocks(logits: Tensor) -> tuple[Tensor, ...]:
    """The rows of `logits` [t, v] that are computed together: on a host as many as stay in its cache from pass to pass."""
    if logits.device.type != "cpu":
        return logits.split(max(1, len(logits)))
    return logits.split(max(1, HOST_BLOCK // max(1, logits.shape[-1])))


def without_holes(values: Tensor) -> Tensor:
    """0 in place of -inf, which has the probability 0 and would make NaN of the product with it."""
    return values.nan_to_num_(nan=torch.nan, neginf=0.0)


def join_sums(parts: list[tuple[Tensor, ...]], local_targets: LocalTargets, *, entropy: bool) -> Distribution:
    """Put the local_sums() of all chunks and ranks together. A token that no rank has is NaN, so that it is not overlooked."""
    ids, axis = local_targets.ids, local_targets.part.axis
    if not parts:
        nothing = torch.zeros(0, device=ids.device)
        return Distribution(nothing.view(ids.shape), nothing if entropy else None, *[nothing] * 3)
    top, total, moment, picked = (torch.cat(values) for values in zip(*parts, strict=True))
    largest = axis.max(top)
    lower = torch.where(top.isneginf(), 0.0, top - largest)  # at most 0
    scale = lower.exp()
    at_largest = torch.where(local_targets.here, picked - largest[:, None], 0.0)
    totals, moments = (total * scale)[:, None], ((moment + total * lower) * scale)[:, None]
    sums = torch.cat([totals, moments, at_largest, local_targets.here], dim=1)
    total, moment, picked, found = axis.sum(sums).tensor_split([1, 2, 2 + ids.shape[1]], dim=1)
    log_total = total.log()
    logprobs = torch.where(ids < 0, 0.0, torch.where(found > 0, picked - log_total, torch.nan))
    entropies = (log_total - moment / total)[:, 0] if entropy else None
    return Distribution(logprobs, entropies, largest, total[:, 0], scale / total[:, 0])


def gradient(logits: Tensor, found: Distribution, grad_logprobs: Tensor, grad_entropy: Tensor | None) -> Tensor:
    """Gradient of the logits [t, v] but for what the tokens asked for add, in the memory of the logits.

    With p the softmax: d log p_k / dz = onehot_k - p, and d entropy / dz = -p (log p + entropy).
    """
    start = 0
    for block in blocks(logits):
        rows = slice(start, start + len(block))
        upstream = grad_logprobs[rows], None if grad_entropy is None else grad_entropy[rows]
        _block_gradient(block, found.rows(rows), *upstream)
        start = rows.stop
    return logits


def _block_gradient(logits: Tensor, found: Distribution, grad_logprobs: Tensor, grad_entropy: Tensor | None) -> None:
    asked_for = grad_logprobs.sum(-1, keepdim=True)
    below, total = logits.sub_(found.largest[:, None]), found.total[:, None]
    if grad_entropy is None:
        below.exp_().mul_(-asked_for / total)
        return
    through_entropy = without_holes(below.clone()).add_(found.entropy[:, None] - total.log()).mul_(grad_entropy[:, None])
    below.exp_().div_(total).mul_(through_entropy.add_(asked_for).neg_())


def gradient_of_exponentials(
    exponentials: Tensor, found: Distribution, grad_logprobs: Tensor, grad_entropy: Tensor | None
) -> Tensor:
    """The same from the exponentials [t, v] of local_sums(), in their memory.

    A logarithm brings an exponential's exponent back to the last bit of its own rounding, wherever the exponential counts.
    """
    asked_for, scale = grad_logprobs.sum(-1, keepdim=True), found.scale[:, None]
    if grad_entropy is None:
        return exponentials.mul_(-asked_for * scale)
    slope = grad_entropy[:, None] * scale
    factor = asked_for * scale + slope * (without_holes(scale.log()) + found.entropy[:, None])
    start = 0
    for block in blocks(exponentials):
        rows = slice(start, start + len(block))
        moments = torch.xlogy(block, block).mul_(slope[rows])
        block.mul_(factor[rows]).add_(moments).neg_()
        start = rows.stop
    return exponentials
