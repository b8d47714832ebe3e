"""The distribution of a token where each rank holds a part of the vocabulary, and the parts joined; one part may be all of it.

A rank keeps of each row of logits the largest, the sum of exponentials relative to it, their first moment, and the logits asked
for if they are here. Two collectives join them, whatever the number of chunks: the largest, then all sums at once. The
gradient of the logits needs none.

Shapes: T tokens, t of one chunk, V vocabulary, v of it here, K tokens asked for at each position.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.algorithms.truncation import Truncation
from lightrft.parallel.collectives import Axis
from lightrft.parallel.sequence import gathered


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
class Joined:
    """The distribution of each row over the vocabulary of all ranks, of the part that a truncation leaves."""

    logprobs: Tensor
    """[T, K], 0 for what is not asked for."""
    entropy: Tensor  # [T]
    largest: Tensor
    """[T], of the logits."""
    total: Tensor
    """[T], sum of the exponentials relative to the largest. Apart from it, since their sum in one number would lose as many
    digits as the largest has."""
    scale: Tensor
    """[T]: a probability is an exponential relative to this rank's largest times this."""


class Asked:
    """The tokens asked for [T, K], negative ones ignored: which belong to this rank's part, and where in it."""

    def __init__(self, ids: Tensor, part: VocabularyPart):
        self.ids, self.part = ids, part
        self.here = (ids >= part.first) & (ids < part.first + part.num)
        self.places = torch.where(self.here, ids - part.first, 0)

    def pick(self, rows: slice, logits: Tensor) -> Tensor:
        """[t, v] -> [t, K], 0 for what is elsewhere."""
        here = self.here[rows]
        if not self.part.num:
            return torch.zeros_like(here, dtype=torch.float32)
        return torch.where(here, logits.gather(-1, self.places[rows]), 0.0)

    def add(self, rows: slice, gradient: Tensor, values: Tensor) -> Tensor:
        """Add `values` [t, K] to the gradient [t, v] where they belong."""
        if not self.part.num:
            return gradient
        return gradient.scatter_add_(-1, self.places[rows], torch.where(self.here[rows], values, 0.0))

    def kept(self, rows: slice) -> Tensor:
        """[t, K] places of the tokens that no truncation leaves out; `part.num` for what is elsewhere."""
        return torch.where(self.here[rows], self.places[rows], self.part.num)


def outside(logits: Tensor, truncation: Truncation, asked: Asked, rows: slice) -> Tensor:
    """[t, v] bool: the tokens that the truncation leaves out, decided on whole rows, which the ranks divide among them."""
    part = asked.part
    threshold = truncation.threshold(logits) if part.axis.size == 1 else _threshold(logits, truncation, part.axis)
    return truncation.outside(logits, threshold, first=part.first, kept=asked.kept(rows))


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


def local_sums(logits: Tensor, asked: Asked, rows: slice, spare: Tensor, *, holes: bool) -> tuple[Tensor, ...]:
    """The largest logit [t], sum of exponentials relative to it [t], their first moment [t], the logits asked for [t, K].

    `logits` are used up; `spare` [t, v] gets the exponentials. `holes`: some of the logits may be -inf.
    """
    picked = asked.pick(rows, logits)
    if not asked.part.num:
        zeros = torch.zeros(len(logits), device=logits.device)
        return zeros - torch.inf, zeros, zeros, picked
    top = logits.amax(-1)
    # At most 0, so nothing overflows and the entropy does not cancel. All of a part may be -inf.
    below = logits.sub_(torch.where(top.isneginf(), 0.0, top)[:, None])
    weights = torch.exp(below, out=spare)
    below = without_holes(below) if holes else below
    return top, weights.sum(-1), below.mul_(weights).sum(-1), picked


def without_holes(values: Tensor) -> Tensor:
    """0 in place of -inf, which has the probability 0 and would make NaN of the product with it."""
    return values.nan_to_num_(nan=torch.nan, neginf=0.0)


def join(parts: list[tuple[Tensor, ...]], asked: Asked) -> Joined:
    """Put the local_sums() of all chunks and ranks together. A token that no rank has is NaN, so that it is not overlooked."""
    ids, axis = asked.ids, asked.part.axis
    if not parts:
        nothing = torch.zeros(0, device=ids.device)
        return Joined(nothing.view(ids.shape), *[nothing] * 4)
    top, total, moment, picked = (torch.cat(values) for values in zip(*parts, strict=True))
    largest = axis.max(top)
    lower = torch.where(top.isneginf(), 0.0, top - largest)  # at most 0
    scale = lower.exp()
    at_largest = torch.where(asked.here, picked - largest[:, None], 0.0)
    sums = torch.cat([(total * scale)[:, None], ((moment + total * lower) * scale)[:, None], at_largest, asked.here], dim=1)
    total, moment, picked, found = axis.sum(sums).tensor_split([1, 2, 2 + ids.shape[1]], dim=1)
    log_total = total.log()
    logprobs = torch.where(ids < 0, 0.0, torch.where(found > 0, picked - log_total, torch.nan))
    return Joined(logprobs, (log_total - moment / total)[:, 0], largest, total[:, 0], scale / total[:, 0])


def gradient(
    logits: Tensor, largest: Tensor, total: Tensor, entropy: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor | None
) -> Tensor:
    """Gradient of the logits [t, v] but for what the tokens asked for add, in the memory of the logits.

    With p the softmax: d log p_k / dz = onehot_k - p, and d entropy / dz = -p (log p + entropy).
    """
    asked_for = grad_logprobs.sum(-1, keepdim=True)
    below, total = logits.sub_(largest[:, None]), total[:, None]
    if grad_entropy is None:
        return below.exp_().mul_(-asked_for / total)
    p = below.exp().div_(total)
    through_entropy = without_holes(below).add_(entropy[:, None] - total.log()).mul_(grad_entropy[:, None])
    return p.mul_(through_entropy.add_(asked_for).neg_())
