"""Log-probabilities and entropy of given tokens, from hidden states, without ever holding all logits.

The logits of a chunk of tokens exist at a time, in the forward pass and again in the backward pass, where they are
computed once more. From the first exponential on everything is float32, whatever the dtype of the model.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK = 1024
"""Tokens whose logits exist at the same time."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk: int | None = CHUNK
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at `targets`, and the entropy of that distribution.

    hidden [T, H], weight [V, H], targets [T]; returns two [T] float32. Where the target is negative (ignored) the
    log-prob is 0 and has no gradient. `chunk` None takes all tokens at once. Both results are differentiable.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk or max(len(hidden), 1))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        log_sums, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows in _chunks(len(hidden), chunk):
            logits = _logits(hidden[rows], weight, temperature)
            log_sums[rows] = logits.logsumexp(-1)
            logp = logits.sub_(log_sums[rows, None])
            logprobs[rows] = _pick(logp, targets[rows])
            entropy[rows] = -logp.exp().mul_(logp).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return torch.where(targets < 0, 0.0, logprobs), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """With p the softmax and z the logits: d logp / dz = onehot - p, d entropy / dz = -p (log p + entropy)."""
        hidden, weight, targets, log_sums, entropy = ctx.saved_tensors
        grad_logprobs = torch.where(targets < 0, 0.0, grad_logprobs)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _chunks(len(hidden), ctx.chunk):
            logp = _logits(hidden[rows], weight, ctx.temperature).sub_(log_sums[rows, None])
            p = logp.exp()
            through_entropy = logp.add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
            grad = p.mul_(through_entropy.add_(grad_logprobs[rows, None]).neg_())
            grad.scatter_add_(-1, targets[rows, None].clamp(min=0), grad_logprobs[rows, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += (grad.T @ hidden[rows]).float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[t, H], [V, H] -> [t, V] float32, in a tensor of their own."""
    return (hidden @ weight.T).float().div_(temperature)


def _pick(logp: Tensor, targets: Tensor) -> Tensor:
    return logp.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
