"""Log-probabilities of tokens, without ever holding all logits.

The logits of a chunk of tokens exist at a time, in the forward pass and again in the backward pass, where they are
computed once more. From the first exponential on everything is float32, whatever the dtype of the model. The temperature
divides a chunk's own float32 logits, never a tensor that somebody else sees.

Shapes: T tokens, H hidden size, V vocabulary, K tokens asked for at each position.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

HOST_CHUNK, DEVICE_CHUNK = 2**25, 2**27
"""Logits that exist at the same time: 128 MB in a host's memory, 512 MB on an accelerator, which wants larger products."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Sampling from a part of the vocabulary: the probabilities of the rest are 0, those of the part sum to 1.

    A token that is asked for always belongs to the part: it was sampled, so only rounding can have put it outside.
    """

    top_k: int = 0
    """Only the k most likely tokens; 0 or less: all."""
    top_p: float = 1.0
    """Only the most likely tokens that reach this probability together."""

    @property
    def active(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0

    def __call__(self, logits: Tensor, kept: Tensor) -> Tensor:
        """`logits` [t, V] with -inf outside of the part; `kept` [t, K] stay."""
        threshold = torch.full((len(logits), 1), -torch.inf, device=logits.device)
        if self.top_k > 0:
            threshold = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
        if self.top_p < 1.0:
            ordered = logits.masked_fill(logits < threshold, -torch.inf).sort(descending=True).values
            before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
            before[:, 0] = 0.0
            last = (before < self.top_p).sum(-1, keepdim=True) - 1
            threshold = torch.maximum(threshold, ordered.gather(-1, last))
        outside = (logits < threshold).scatter_(-1, kept.clamp(min=0), False)
        return logits.masked_fill_(outside, -torch.inf)


ALL = Truncation()


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
    logprobs, entropy = _FromHidden.apply(hidden, weight, columns, temperature, truncation, max(rows, 1))
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
    for rows in _chunks(len(hidden), chunk_rows(weight)):
        logits = _logits(hidden[rows], weight, temperature)
        top = logits.topk(k)
        values.append(top.values - logits.logsumexp(-1, keepdim=True))
        ids.append(top.indices)
    return torch.cat(values), torch.cat(ids)


def chunk_rows(weight: Tensor) -> int:
    """Tokens of one chunk for a vocabulary [V, ...]."""
    return max(1, (HOST_CHUNK if weight.device.type == "cpu" else DEVICE_CHUNK) // len(weight))


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, truncation: Truncation, chunk: int
    ) -> tuple[Tensor, Tensor]:
        results = _empty_results(hidden, targets)
        for rows in _chunks(len(hidden), chunk):
            logits = _logits(hidden[rows], weight, temperature)
            _write(results, rows, _distribution(logits, targets[rows], truncation))
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
        for rows in _chunks(len(hidden), chunk):
            logits = _logits(hidden[rows], weight, temperature)
            upstream = (None if grad is None else grad[rows] for grad in (grad_logprobs, grad_entropy))
            grad = _gradient(logits, targets[rows], truncation, log_sums[rows], entropy[rows], *upstream)
            grad = grad.div_(temperature).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[rows])
            if grad.dtype == torch.float32:
                grad_weight.addmm_(grad.T, hidden[rows])
            else:
                grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, targets: Tensor, temperature: float, truncation: Truncation, chunk: int
    ) -> tuple[Tensor, Tensor]:
        results = _empty_results(logits, targets)
        for rows in _chunks(len(logits), chunk):
            _write(results, rows, _distribution(_own(logits[rows], temperature), targets[rows], truncation))
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
        for rows in _chunks(len(logits), chunk):
            upstream = (None if grad is None else grad[rows] for grad in (grad_logprobs, grad_entropy))
            own = _own(logits[rows], temperature)
            grad_logits[rows] = _gradient(own, targets[rows], truncation, log_sums[rows], entropy[rows], *upstream).div_(temperature)
        return grad_logits, None, None, None, None


def _distribution(logits: Tensor, targets: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs at the targets [t, K], log of the sum of exponentials [t], entropy [t]. `logits` [t, V] are used up."""
    if truncation.active:
        logits = truncation(logits, targets)
    top = logits.amax(-1, keepdim=True)
    below = logits.sub_(top)  # at most 0, so nothing overflows and the entropy does not cancel
    picked = below.gather(-1, targets.clamp(min=0))
    weights = below.exp()
    total = weights.sum(-1)
    mean = torch.linalg.vecdot(weights, below.nan_to_num_(neginf=0.0) if truncation.active else below) / total
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
    """Gradient of the logits [t, V], in their memory.

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


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[t, H], [V, H] -> [t, V] float32, in a tensor of their own."""
    logits = (hidden @ weight.T).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _own(logits: Tensor, temperature: float) -> Tensor:
    """[t, V] float32 at the temperature, in a tensor of their own."""
    return logits / temperature if logits.dtype == torch.float32 else logits.float().div_(temperature)
