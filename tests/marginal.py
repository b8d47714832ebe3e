"""Rows where truncated sampling has a token at its edge, and gradients in float64."""

from functools import cache

import torch
from torch import Tensor

from lightrft.models.logits.truncation import Truncation

VOCABULARY = 2001
WIDTH = 64
MARGINAL = Truncation(top_k=20, top_p=0.95)
MARGINAL_CASES = [
    (tokens, chunk) for tokens in (1, 2, 3, 5, 8, 30) for chunk in (0, None, 1, 7)
] + [(257, 0), (257, 40)]
"""Rows, and how many of them are computed at a time."""


def marginal_inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return hidden states [T, H], weight [V, H], targets [T] and gradients of both results.

    The targets are among the likely tokens; the results are log-probs and entropy. Uniform numbers
    have the same bits on every processor, and normal ones have not.
    """
    generator = torch.Generator().manual_seed(200 + tokens)  # no logits are nearly equal
    hidden = torch.rand(tokens, WIDTH, generator=generator) * 3.5 - 1.75
    weight = (torch.rand(VOCABULARY, WIDTH, generator=generator) * 3.5 - 1.75) / 8
    targets = (hidden @ weight.T).topk(5).indices[:, 2]
    upstream = [torch.linspace(-1.0, 2.0, tokens), torch.linspace(0.5, -0.7, tokens)]
    return hidden.requires_grad_(), weight.requires_grad_(), targets, upstream


def check_marginal(tokens: int, found: list[Tensor]) -> None:
    """Compare log-probs, entropy and gradients of hidden states and weight with float64."""
    for value, wanted in zip(found, _in_float64(tokens), strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=2e-5, atol=2e-5)


@cache
def _in_float64(tokens: int) -> list[Tensor]:
    hidden, weight, targets, upstream = marginal_inputs(tokens)
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    logits = hidden @ weight.T
    best, order = logits.sort(descending=True)
    best = best[:, : MARGINAL.top_k]
    before = best.softmax(-1).cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    # so that no rounding decides what is inside
    assert (before - MARGINAL.top_p).abs().min() > 1e-5 and (
        logits.sort(descending=True).values.diff()[:, :20] < -1e-6
    ).all()

    kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(
        -1, order[:, : MARGINAL.top_k], before < MARGINAL.top_p
    )
    kept[torch.arange(tokens), targets] = True
    logp = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    inside = torch.where(kept, logp, 0.0)
    values = [logp.gather(-1, targets[:, None])[:, 0], -(inside.exp() * inside * kept).sum(-1)]
    gradients = torch.autograd.grad(values, [hidden, weight], [each.double() for each in upstream])

    return [value.detach() for value in values] + list(gradients)
