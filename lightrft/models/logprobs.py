"""Log-probabilities of tokens, without ever holding all logits.

The logits of a chunk of tokens exist at a time, in the forward pass and again in the backward pass, where they are
computed once more; only where all tokens fit into the memory of a chunk their exponentials are kept instead. From the first
exponential on everything is float32, whatever the dtype of the model. The temperature divides a chunk's own float32 logits,
never a tensor that somebody else sees.

Shapes: T tokens, H hidden size, V vocabulary, K tokens asked for at each position.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lightrft.algorithms.truncation import ALL, Truncation

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
    """
    columns = targets if targets.dim() == 2 else targets[:, None]
    rows = len(hidden) if chunk is None else chunk or chunk_rows(weight)
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    logprobs, entropy = _FromHidden.apply(hidden, weight, columns, temperature, truncation, max(rows, 1), learns)
    return logprobs.view(targets.shape), entropy


def logprobs_of_logits(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, truncation: Truncation = ALL, chunk: int | None = 0
) -> tuple[Tensor, Tensor]:
    """The same from logits [T, V] that are there already; they are not changed."""
    columns = targets if targets.dim() == 2 else targets[:, None]
    rows = len(logits) if chunk is None else chunk or chunk_rows(logits.T)
    logprobs, entropy = _FromLogits.apply(logits, columns, temperature, truncation, max(rows, 1))
    return logprobs.view(targets.shape), entropy


@torch.no_grad()
def top_logprobs(hidden: Tensor, weight: Tensor, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each position, for distillation: log-probs [T, k] float32 and ids [T, k], likeliest first."""
    values, ids = [], []
    for rows, logits in row_chunks(hidden, len(weight), chunk_rows(weight)):
        top = scaled_logits(hidden[rows], weight, temperature, out=logits).topk(k)
        values.append(top.values - logits.logsumexp(-1, keepdim=True))
        ids.append(top.indices)
    return torch.cat(values), torch.cat(ids)


def chunk_rows(weight: Tensor) -> int:
    """Tokens of one chunk for a vocabulary [V, ...]."""
    return max(1, (HOST_CHUNK if weight.device.type == "cpu" else DEVICE_CHUNK) // len(weight))


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, truncation: Truncation, chunk: int,
        learns: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        results = _empty_results(hidden, targets)
        fits = learns and len(hidden) <= chunk
        ctx.kept = torch.empty(len(hidden), len(weight), dtype=torch.float32, device=hidden.device) if fits else None
        for rows, logits, spare in _forward_chunks(hidden, weight, chunk, ctx.kept):
            scaled_logits(hidden[rows], weight, temperature, out=logits)
            _write(results, rows, _distribution(logits, targets[rows], truncation, spare))
        logprobs, log_sums, entropy = results
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy)
        ctx.options = temperature, truncation, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sums, entropy = ctx.saved_tensors
        temperature, truncation, chunk = ctx.options
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

        def computed_again() -> Iterator[tuple[slice, Tensor]]:
            for rows, logits in row_chunks(hidden, len(weight), chunk):
                scaled_logits(hidden[rows], weight, temperature, out=logits)
                upstream = (None if grad is None else grad[rows] / temperature for grad in (grad_logprobs, grad_entropy))
                yield rows, _gradient(logits, targets[rows], truncation, log_sums[rows], entropy[rows], *upstream)

        kept, ctx.kept = ctx.kept, None  # the gradient takes its place, so another backward pass computes again
        kept = kept if grad_entropy is None else None  # that one needs the logits
        gradients = computed_again() if kept is None else [
            (slice(None), _gradient_of_kept(kept, targets, grad_logprobs / temperature))
        ]  # fmt: skip
        for rows, grad in gradients:
            grad = grad.to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[rows])
            if grad.dtype == torch.float32:
                grad_weight.addmm_(grad.T, hidden[rows])
            else:
                grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _forward_chunks(hidden: Tensor, weight: Tensor, chunk: int, kept: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows, memory for their logits and for their exponentials: `kept`, which is [T, V], or some that is used again.

    The rows do not depend on whether there is something to keep, and so the results are the same to the last bit.
    """
    if len(hidden) > chunk:
        yield from row_chunks(hidden, len(weight), chunk, buffers=2)
        return
    spare = None
    for rows, logits in row_chunks(hidden, len(weight), chunk // 4):
        spare = torch.empty_like(logits) if spare is None and kept is None else spare
        yield rows, logits, spare[: len(logits)] if kept is None else kept[rows]


def _gradient_of_kept(weights: Tensor, targets: Tensor, grad_logprobs: Tensor) -> Tensor:
    """Gradient of the logits [T, V] from unnormalised probabilities, in their memory: d log p_k / dz = onehot_k - p."""
    grad_logprobs = torch.where(targets < 0, 0.0, grad_logprobs)
    grad = weights.mul_(-grad_logprobs.sum(-1, keepdim=True) / weights.sum(-1, keepdim=True))
    return grad.scatter_add_(-1, targets.clamp(min=0), grad_logprobs)


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, targets: Tensor, temperature: float, truncation: Truncation, chunk: int
    ) -> tuple[Tensor, Tensor]:
        results = _empty_results(logits, targets)
        for rows, own, spare in row_chunks(logits, logits.shape[1], chunk, buffers=2):
            own.copy_(logits[rows]).div_(temperature)
            _write(results, rows, _distribution(own, targets[rows], truncation, spare))
        logprobs, log_sums, entropy = results
        ctx.save_for_backward(logits, targets, log_sums, entropy)
        ctx.options = temperature, truncation, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, log_sums, entropy = ctx.saved_tensors
        temperature, truncation, chunk = ctx.options
        grad_logits = torch.empty_like(logits)
        for rows, own in row_chunks(logits, logits.shape[1], chunk):
            own.copy_(logits[rows]).div_(temperature)
            upstream = (None if grad is None else grad[rows] / temperature for grad in (grad_logprobs, grad_entropy))
            grad_logits[rows] = _gradient(own, targets[rows], truncation, log_sums[rows], entropy[rows], *upstream)
        return grad_logits, None, None, None, None


def _distribution(logits: Tensor, targets: Tensor, truncation: Truncation, spare: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs at the targets [t, K], log of the sum of exponentials [t], entropy [t].

    `logits` [t, V] are used up, and so is the memory of `spare` [t, V].
    """
    if truncation.active:
        logits = truncation(logits, targets)
    top = logits.amax(-1, keepdim=True)
    below = logits.sub_(top)  # at most 0, so nothing overflows and the entropy does not cancel
    picked = below.gather(-1, targets.clamp(min=0))
    weights = torch.exp(below, out=spare)
    total = weights.sum(-1)
    if truncation.active:
        below.nan_to_num_(neginf=0.0)
    mean = below.mul_(weights).sum(-1) / total
    log_total = total.log()
    return torch.where(targets < 0, 0.0, picked - log_total[:, None]), top[:, 0] + log_total, log_total - mean


def _gradient(
    logits: Tensor,
    targets: Tensor,
    truncation: Truncation,
    log_sums: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Gradient of the logits [t, V], in their memory; the caller has divided the upstream gradients by the temperature.

    With p the softmax: d log p_k / dz = onehot_k - p, and d entropy / dz = -p (log p + entropy).
    """
    if truncation.active:
        logits = truncation(logits, targets)
    logp = logits.sub_(log_sums[:, None])
    if grad_logprobs is None:
        grad_logprobs = torch.zeros(targets.shape, device=logits.device)
    grad_logprobs = torch.where(targets < 0, 0.0, grad_logprobs)
    total = grad_logprobs.sum(-1, keepdim=True)
    if grad_entropy is None:
        grad = logp.exp_().mul_(-total)
    else:
        p = logp.exp()
        through_entropy = logp.nan_to_num_(neginf=0.0).add_(entropy[:, None]).mul_(grad_entropy[:, None])
        grad = p.mul_(through_entropy.add_(total).neg_())
    return grad.scatter_add_(-1, targets.clamp(min=0), grad_logprobs)


def _empty_results(like: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [T, K], log-sums [T], entropy [T], to be written chunk by chunk."""
    options = {"dtype": torch.float32, "device": like.device}
    return torch.empty(targets.shape, **options), torch.empty(len(like), **options), torch.empty(len(like), **options)


def _write(results: tuple[Tensor, ...], rows: slice, values: tuple[Tensor, ...]) -> None:
    for result, value in zip(results, values, strict=True):
        result[rows] = value


def row_chunks(like: Tensor, vocabulary: int, size: int, buffers: int = 1) -> Iterator[tuple]:
    """Rows of `like` [T, ...] chunk by chunk, and for each chunk the same memory again: `buffers` of [t, V] float32.

    All buffers together hold `size` rows. New memory for every chunk would cost a host more than the exponentials,
    because it is paged in at the first touch.
    """
    size = max(1, min(size, len(like)) // buffers)
    memory = [torch.empty(size, vocabulary, dtype=torch.float32, device=like.device) for _ in range(buffers)]
    for start in range(0, len(like), size):
        rows = slice(start, min(start + size, len(like)))
        yield rows, *(buffer[: rows.stop - start] for buffer in memory)


def scaled_logits(hidden: Tensor, weight: Tensor, temperature: float, out: Tensor) -> Tensor:
    """[t, H], [V, H] -> [t, V] float32, in the memory of `out`."""
    if hidden.dtype == torch.float32:
        torch.mm(hidden, weight.T, out=out)
    else:
        out.copy_(hidden @ weight.T)
    return out if temperature == 1.0 else out.div_(temperature)
