"""Log-probs of tokens where each rank holds a part of the vocabulary: the same numbers as from the whole of it.

A rank makes the logits of its own tokens chunk by chunk and keeps four numbers of each row: the largest, the sum of
exponentials relative to it, their first moment, and the logit asked for if it is here. Two collectives join them, whatever the
number of chunks: the largest, then all sums at once. The backward pass needs none for the logits; the gradient of the hidden
states, to which every part of the vocabulary contributes, is summed once.

Shapes: T tokens, H hidden size, V vocabulary, v of it here, K tokens asked for at each position.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lightrft.algorithms.truncation import ALL, Truncation
from lightrft.models.logprobs import chunk_rows, row_chunks, scaled_logits, token_logprobs, top_logprobs
from lightrft.parallel.collectives import Axis
from lightrft.parallel.sequence import gathered
from lightrft.parallel.tensor import VocabularyShard, branch, vocabulary_shard


def head_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """token_logprobs() with the output embedding as it lies: whole, or split over tensor-parallel ranks."""
    shard = vocabulary_shard(weight)
    if shard is None:
        return token_logprobs(hidden, weight, targets, **options)
    return shard_logprobs(hidden, shard, targets, **options)


def head_top_logprobs(hidden: Tensor, weight: Tensor, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """top_logprobs() with the output embedding as it lies."""
    shard = vocabulary_shard(weight)
    if shard is None:
        return top_logprobs(hidden, weight, k, temperature=temperature)
    return shard_top_logprobs(hidden, shard, k, temperature=temperature)


def shard_logprobs(
    hidden: Tensor,
    shard: VocabularyShard,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    truncation: Truncation = ALL,
    chunk: int | None = 0,
) -> tuple[Tensor, Tensor]:
    """token_logprobs() of `hidden` [T, H], `targets` [T] or [T, K] that are equal on all ranks of the shard's axis.

    Results and the gradient of `hidden` are equal on all of them too. A truncation costs three more collectives per chunk
    in the forward pass: it is decided on whole rows, which the ranks divide among them.
    """
    columns = targets if targets.dim() == 2 else targets[:, None]
    rows = len(hidden) if chunk is None else chunk or shard_rows(hidden, shard)
    logprobs, entropy = _FromShard.apply(
        branch(hidden, shard.axis), shard.weight, columns, shard.first, shard.axis, temperature, truncation, max(rows, 1)
    )
    return logprobs.view(targets.shape), entropy


@torch.no_grad()
def shard_top_logprobs(hidden: Tensor, shard: VocabularyShard, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """top_logprobs() of `hidden` [T, H] that are equal on all ranks of the shard's axis, as the results are.

    The k likeliest of all are among the k likeliest of each rank: three collectives bring those and the sums together.
    """
    if k > shard.size:
        raise ValueError(f"the {k} likeliest of a vocabulary of {shard.size} tokens were asked for")
    axis, size = shard.axis, len(shard.weight)
    values = torch.full((len(hidden), k), -torch.inf, device=hidden.device)  # so it stays where a rank has fewer than k
    ids = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)
    sums = torch.full((len(hidden),), -torch.inf, device=hidden.device)
    for rows, logits in row_chunks(hidden, size, shard_rows(hidden, shard)):
        scaled_logits(hidden[rows], shard.weight, temperature, out=logits)
        here = min(k, size)
        values[rows, :here], ids[rows, :here] = logits.topk(here)
        sums[rows] = logits.logsumexp(-1)
    values, ids, sums = (gathered(x, axis).view(axis.size, *x.shape) for x in (values, ids + shard.first, sums))
    top, places = values.transpose(0, 1).flatten(1).topk(k)
    return top - sums.logsumexp(0)[:, None], ids.transpose(0, 1).flatten(1).gather(1, places)


def shard_rows(hidden: Tensor, shard: VocabularyShard) -> int:
    """Tokens of one chunk, equal on all ranks."""
    return chunk_rows(hidden.new_empty(1).expand(-(-shard.size // shard.axis.size)))


class _FromShard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor, first: int, axis: Axis, temperature: float,
        truncation: Truncation, chunk: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        here = _Here(targets, first, len(weight), truncation)
        rows_of, thresholds = [], []
        for rows, logits, spare in row_chunks(hidden, len(weight), chunk, buffers=2):
            scaled_logits(hidden[rows], weight, temperature, out=logits)
            if truncation.active:
                thresholds.append(_threshold(logits, truncation, axis))
                here.truncate(logits, rows, thresholds[-1])
            rows_of.append(_local_sums(logits, here, rows, spare))
        logprobs, log_sums, entropy = _joined(rows_of, targets, here, axis)
        threshold = torch.cat(thresholds) if thresholds else None
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy, threshold)
        ctx.options = first, temperature, truncation, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sums, entropy, threshold = ctx.saved_tensors
        first, temperature, truncation, chunk = ctx.options
        here = _Here(targets, first, len(weight), truncation)
        grad_logprobs = torch.zeros(targets.shape, device=hidden.device) if grad_logprobs is None else grad_logprobs
        grad_logprobs = torch.where(targets < 0, 0.0, grad_logprobs) / temperature
        grad_entropy = None if grad_entropy is None else grad_entropy / temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows, logits in row_chunks(hidden, len(weight), chunk):
            scaled_logits(hidden[rows], weight, temperature, out=logits)
            if threshold is not None:
                here.truncate(logits, rows, threshold[rows])
            logp = logits.sub_(log_sums[rows, None])
            grad = _gradient(logp, grad_logprobs[rows], entropy[rows], None if grad_entropy is None else grad_entropy[rows])
            grad.scatter_add_(-1, *here.owned(rows, grad_logprobs[rows]))
            grad = grad.to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[rows])
            grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


class _Here:
    """Which of the tokens asked for belong to this rank's part of the vocabulary, and where in it."""

    def __init__(self, targets: Tensor, first: int, size: int, truncation: Truncation):
        self.first, self.size, self.truncation = first, size, truncation
        self.mine = (targets >= first) & (targets < first + size)
        self.places = torch.where(self.mine, targets - first, 0)

    def owned(self, rows: slice, values: Tensor) -> tuple[Tensor, Tensor]:
        """Places [t, K] and `values` [t, K], 0 for what is elsewhere."""
        if not self.size:
            return self.places[rows, :0], values[:, :0]
        return self.places[rows], torch.where(self.mine[rows], values, 0.0)

    def pick(self, rows: slice, logits: Tensor) -> Tensor:
        """[t, v] -> [t, K], 0 for what is elsewhere."""
        mine = self.mine[rows]
        if not self.size:
            return torch.zeros_like(mine, dtype=torch.float32)
        return torch.where(mine, logits.gather(-1, self.places[rows]), 0.0)

    def truncate(self, logits: Tensor, rows: slice, threshold: Tensor) -> None:
        """-inf for what is outside, with the threshold [t, 1] of the whole vocabulary, except tokens asked for."""
        kept = torch.where(self.mine[rows], self.places[rows], self.size)  # what is elsewhere falls into one more column
        outside = self.truncation.outside(logits, threshold, first=self.first)
        outside = torch.nn.functional.pad(outside, (0, 1)).scatter_(-1, kept, False)
        logits.masked_fill_(outside[:, :-1], -torch.inf)


def _threshold(logits: Tensor, truncation: Truncation, axis: Axis) -> Tensor:
    """The smallest logit that stays, [t, 1], from this rank's columns [t, v] of all ranks' rows."""
    each = -(-len(logits) // axis.size)
    padded = torch.nn.functional.pad(logits, (0, 0, 0, each * axis.size - len(logits)))
    whole = torch.cat(axis.exchange([part.T.contiguous() for part in padded.split(each)])).T
    threshold = truncation.threshold(whole.contiguous())
    return torch.cat(axis.exchange([threshold] * axis.size))[: len(logits)]


def _local_sums(logits: Tensor, here: _Here, rows: slice, spare: Tensor) -> tuple[Tensor, ...]:
    """The largest logit [t], sum of exponentials below it [t], their first moment [t], the ones asked for [t, K]."""
    picked = here.pick(rows, logits)
    if not here.size:
        zeros = torch.zeros(len(logits), device=logits.device)
        return zeros - torch.inf, zeros, zeros, picked
    top = logits.amax(-1)
    below = logits.sub_(top.where(~top.isneginf(), 0.0)[:, None])  # a part may be truncated altogether
    weights = torch.exp(below, out=spare)
    return top, weights.sum(-1), below.nan_to_num_(nan=torch.nan, neginf=0.0).mul_(weights).sum(-1), picked


def _joined(parts: list[tuple[Tensor, ...]], targets: Tensor, here: _Here, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [T, K], log of the sum of exponentials [T] and entropy [T] over the vocabulary of all ranks."""
    if not parts:
        nothing = torch.zeros(0, device=targets.device)
        return nothing.view(targets.shape), nothing, nothing
    top, total, moment, picked = (torch.cat(values) for values in zip(*parts, strict=True))
    largest = axis.max(top)
    lower = torch.where(top.isneginf(), 0.0, top - largest)  # at most 0
    scale = lower.exp()
    at_largest = torch.where(here.mine, picked - largest[:, None], 0.0)
    sums = torch.cat([(total * scale)[:, None], ((moment + total * lower) * scale)[:, None], at_largest], dim=1)
    total, moment, picked = axis.sum(sums).tensor_split([1, 2], dim=1)
    log_total = total.log()
    logprobs = torch.where(targets < 0, 0.0, picked - log_total)
    return logprobs, largest + log_total[:, 0], (log_total - moment / total)[:, 0]


def _gradient(logp: Tensor, grad_logprobs: Tensor, entropy: Tensor, grad_entropy: Tensor | None) -> Tensor:
    """Gradient of the logits [t, v] but for the tokens asked for, in the memory of their log-probs.

    With p the softmax: d log p_k / dz = onehot_k - p, and d entropy / dz = -p (log p + entropy).
    """
    total = grad_logprobs.sum(-1, keepdim=True)
    if grad_entropy is None:
        return logp.exp_().mul_(-total)
    p = logp.exp()
    through_entropy = logp.nan_to_num_(nan=torch.nan, neginf=0.0).add_(entropy[:, None]).mul_(grad_entropy[:, None])
    return p.mul_(through_entropy.add_(total).neg_())
