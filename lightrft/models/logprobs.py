"""Log-probabilities of tokens, without ever holding all logits.

The logits of a chunk of tokens exist at a time, in the forward pass and again in the backward pass, where they are computed
once more, in products of the same shape; only where all tokens fit into the memory of a chunk their exponentials are kept
instead. A truncation is decided once, in the forward pass, and kept as a bit for each token. From the first exponential on
everything is float32, whatever the dtype of the model. The temperature divides a chunk's own float32 logits, never a tensor that
somebody else sees.

The vocabulary may be split over tensor-parallel ranks: vocabulary.py has what they do together. The gradient of the hidden
states, to which every part of the vocabulary contributes, is then summed once.

Shapes: T tokens, H hidden size, V vocabulary, v of it on this rank, K tokens asked for at each position.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lightrft.algorithms.truncation import ALL, Truncation
from lightrft.models import vocabulary
from lightrft.models.vocabulary import Asked, VocabularyPart
from lightrft.parallel.sequence import gathered
from lightrft.parallel.tensor import branch, vocabulary_shard

HOST_CHUNK, DEVICE_CHUNK = 2**25, 2**27
"""Logits that exist at the same time: 128 MB in a host's memory, 512 MB on an accelerator, which wants larger products."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    truncation: Truncation = ALL,
    chunk: int | None = 0,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at `targets`, and the entropy of that distribution.

    hidden [T, H], weight [V, H]; targets [T], or [T, K] for several tokens at each position. Returns the log-probs in the
    shape of the targets and the entropy [T], both float32 and differentiable. A negative target (-100) is ignored: its
    log-prob is 0 and has no gradient. `chunk` tokens at a time: 0 lets the vocabulary decide, None takes all at once.

    A weight that parallelize() split is used as it lies; hidden states and targets are then equal on all ranks of its axis, as
    are the results and the gradient of the hidden states. A truncation costs some collectives per chunk in the forward pass.
    """
    shard = vocabulary_shard(weight)
    if shard is None:
        part = VocabularyPart.whole(len(weight))
        return _logprobs(hidden, weight, targets, part, chunk_rows(weight, len(weight)), temperature, truncation, chunk)
    part = VocabularyPart(shard.first, len(shard.weight), shard.axis)
    rows = chunk_rows(shard.weight, -(-shard.size // shard.axis.size))  # equal on all ranks
    return _logprobs(branch(hidden, shard.axis), shard.weight, targets, part, rows, temperature, truncation, chunk)


def logprobs_of_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    part: VocabularyPart | None = None,
    temperature: float = 1.0,
    truncation: Truncation = ALL,
    chunk: int | None = 0,
) -> tuple[Tensor, Tensor]:
    """The same from logits [T, V] that are there already; they are not changed.

    With a `part` they are [T, v], of this rank's part of the vocabulary, and each rank gets the gradient of its own.
    """
    part = part or VocabularyPart.whole(logits.shape[1])
    rows = chunk_rows(logits, max(part.num, 1))
    if truncation.active and not chunk:  # as many chunks on all ranks, whose parts may differ
        rows = int(part.axis.min(torch.tensor(rows, device=logits.device)))
    return _logprobs(logits, None, targets, part, rows, temperature, truncation, chunk)


@torch.no_grad()
def top_logprobs(hidden: Tensor, weight: Tensor, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each position, for distillation: log-probs [T, k] float32 and ids [T, k], likeliest first.

    With a weight that parallelize() split, three collectives; results are equal on all ranks of its axis.
    """
    shard = vocabulary_shard(weight)
    if shard is None:
        return _top(hidden, weight, VocabularyPart.whole(len(weight)), len(weight), k, temperature)
    return _top(hidden, shard.weight, VocabularyPart(shard.first, len(shard.weight), shard.axis), shard.size, k, temperature)


@torch.no_grad()
def top_logprobs_of_logits(
    logits: Tensor, k: int, *, part: VocabularyPart | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same from logits [T, V]; [T, v] of this rank's `part` of the vocabulary."""
    part = part or VocabularyPart.whole(logits.shape[1])
    size = int(part.axis.sum(torch.tensor(part.num, device=logits.device)))
    return _top(logits, None, part, size, k, temperature)


def chunk_rows(like: Tensor, vocabulary: int) -> int:
    """Tokens of one chunk of a vocabulary of so many tokens, where `like` is."""
    return max(1, (HOST_CHUNK if like.device.type == "cpu" else DEVICE_CHUNK) // vocabulary)


def _logprobs(
    given: Tensor, weight: Tensor | None, targets: Tensor, part: VocabularyPart, rows: int, temperature: float,
    truncation: Truncation, chunk: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    columns = targets if targets.dim() == 2 else targets[:, None]
    rows = max(1, len(given) if chunk is None else chunk or rows)
    learns = torch.is_grad_enabled() and (given.requires_grad or (weight is not None and weight.requires_grad))
    logprobs, entropy = _Logprobs.apply(given, weight, columns, part, temperature, truncation, rows, learns)
    return logprobs.view(targets.shape), entropy


def _top(
    given: Tensor, weight: Tensor | None, part: VocabularyPart, size: int, k: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """The k likeliest of all ranks are among the k likeliest of each."""
    if k > size:
        raise ValueError(f"the {k} likeliest of a vocabulary of {size} tokens were asked for")
    values = torch.full((len(given), k), -torch.inf, device=given.device)  # so it stays where a rank has fewer than k
    ids = torch.zeros(len(given), k, dtype=torch.int64, device=given.device)
    sums = torch.full((len(given),), -torch.inf, device=given.device)
    here = min(k, part.num)
    for rows, logits in row_chunks(given, part.num, chunk_rows(given, max(part.num, 1))):
        scaled_logits(given[rows], weight, temperature, out=logits)
        values[rows, :here], ids[rows, :here] = logits.topk(here)
        sums[rows] = logits.logsumexp(-1)
    axis = part.axis
    if axis.size > 1:
        values, ids, sums = (gathered(x, axis).view(axis.size, *x.shape) for x in (values, ids + part.first, sums))
        values, places = values.transpose(0, 1).flatten(1).topk(k)
        ids, sums = ids.transpose(0, 1).flatten(1).gather(1, places), sums.logsumexp(0)
    return values - sums[:, None], ids


class _Logprobs(torch.autograd.Function):
    """Log-probs [T, K] and entropy [T] from hidden states [T, H] and a weight [v, H], or, without one, from logits [T, v]."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, given: Tensor, weight: Tensor | None, targets: Tensor, part: VocabularyPart, temperature: float,
        truncation: Truncation, chunk: int, learns: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        asked, cuts = Asked(targets, part), truncation.active
        fits = learns and weight is not None and len(given) <= chunk
        ctx.kept = torch.empty(len(given), part.num, dtype=torch.float32, device=given.device) if fits else None
        bits, width = None, vocabulary.packed_width(part.num)
        if learns and cuts:
            bits = torch.empty(len(given), width, dtype=torch.uint8, device=given.device)
        sums = []
        for rows, logits, spare in _forward_chunks(given, part.num, product_rows(chunk), ctx.kept):
            scaled_logits(given[rows], weight, temperature, out=logits)
            if cuts:
                outside = vocabulary.outside(logits, truncation, asked, rows)
                logits.masked_fill_(outside, -torch.inf)
                if bits is not None:
                    bits[rows] = vocabulary.packed(outside)
            sums.append(vocabulary.local_sums(logits, asked, rows, spare, holes=cuts or weight is None))
        found = vocabulary.join(sums, asked)
        scale = found.scale if fits else None
        ctx.save_for_backward(given, weight, targets, bits, found.largest, found.total, found.entropy, scale)
        ctx.options = part, temperature, chunk
        ctx.set_materialize_grads(False)
        return found.logprobs, found.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        given, weight, targets, bits, largest, total, entropy, scale = ctx.saved_tensors
        part, temperature, chunk = ctx.options
        asked = Asked(targets, part)
        grad_logprobs = torch.zeros(targets.shape, device=given.device) if grad_logprobs is None else grad_logprobs
        grad_logprobs = torch.where(targets < 0, 0.0, grad_logprobs) / temperature
        grad_entropy = None if grad_entropy is None else grad_entropy / temperature

        def computed_again() -> Iterator[tuple[slice, Tensor]]:
            step = product_rows(chunk)
            size = chunk if len(given) <= chunk else step * (chunk // step)
            for rows, logits in row_chunks(given, part.num, size):
                for start in range(0, len(logits), step):
                    scaled_logits(given[rows][start : start + step], weight, temperature, out=logits[start : start + step])
                if bits is not None:
                    vocabulary.fill_packed(logits, bits[rows], -torch.inf)
                upstream = grad_logprobs[rows], None if grad_entropy is None else grad_entropy[rows]
                grad = vocabulary.gradient(logits, largest[rows], total[rows], entropy[rows], *upstream)
                yield rows, asked.add(rows, grad, upstream[0])

        kept, ctx.kept = ctx.kept, None  # the gradient takes its place, so another backward pass computes again
        if kept is not None and grad_entropy is None:  # that one needs the logits
            kept.mul_(-grad_logprobs.sum(-1, keepdim=True) * scale[:, None])
            gradients = [(slice(None), asked.add(slice(None), kept, grad_logprobs))]
        else:
            gradients = computed_again()
        grads = _of_logits(given, gradients) if weight is None else _of_product(given, weight, gradients)
        return *grads, None, None, None, None, None, None


def _of_logits(logits: Tensor, gradients: Iterator[tuple[slice, Tensor]]) -> tuple[Tensor, None]:
    grad_logits = torch.empty_like(logits)
    for rows, grad in gradients:
        grad_logits[rows] = grad
    return grad_logits, None


def _of_product(hidden: Tensor, weight: Tensor, gradients: Iterator[tuple[slice, Tensor]]) -> tuple[Tensor, Tensor]:
    """Gradients of hidden states and weight from those of the logits; that of the weight is summed in float32."""
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    for rows, grad in gradients:
        grad = grad.to(hidden.dtype)
        torch.mm(grad, weight, out=grad_hidden[rows])
        if grad.dtype == torch.float32:
            grad_weight.addmm_(grad.T, hidden[rows])
        else:
            grad_weight += grad.T @ hidden[rows]
    return grad_hidden, grad_weight.to(weight.dtype)


def product_rows(chunk: int) -> int:
    """Rows of one product, equal in both passes, since a product of another shape has other last bits."""
    return max(1, chunk // 4)


def _forward_chunks(given: Tensor, num: int, step: int, kept: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows, memory for their logits and for their exponentials: of `kept`, which is [T, v], or some that is used again.

    The rows do not depend on whether there is something to keep, and so the results are the same to the last bit.
    """
    spare = None
    for rows, logits in row_chunks(given, num, step):
        spare = torch.empty_like(logits) if spare is None and kept is None else spare
        yield rows, logits, spare[: len(logits)] if kept is None else kept[rows]


def row_chunks(like: Tensor, num: int, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows of `like` [T, ...], `size` at a time, and for each chunk the same memory again, [t, num] float32.

    New memory for every chunk would cost a host more than the exponentials, because it is paged in at the first touch.
    """
    memory = torch.empty(min(size, len(like)), num, dtype=torch.float32, device=like.device)
    for start in range(0, len(like), size):
        rows = slice(start, min(start + size, len(like)))
        yield rows, memory[: rows.stop - start]


def scaled_logits(given: Tensor, weight: Tensor | None, temperature: float, out: Tensor) -> Tensor:
    """Hidden states [t, H] and weight [v, H], or logits [t, v] -> [t, v] float32, in the memory of `out`."""
    if weight is None:
        out.copy_(given)
    elif given.dtype == torch.float32:
        torch.mm(given, weight.T, out=out)
    else:
        out.copy_(given @ weight.T)
    return out if temperature == 1.0 else out.div_(temperature)
