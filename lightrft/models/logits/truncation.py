"""Sampling from a part of the vocabulary: the one definition for trainer and engine.

Shapes: t tokens, V vocabulary, v of it on this rank, K kept tokens at each position.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

HOST_BLOCK = 2**18
"""Number of logits to process together in host memory, so that the second pass finds them in cache.
"""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Restriction of sampling to a part of the vocabulary.

    The probabilities inside sum to 1, and all other tokens have 0. A kept token always belongs to
    the part: it was sampled, so only rounding can have put it outside. All tokens that are as
    likely as the last one inside are inside too. An engine may leave some of them out, and then the
    log-probs are larger by at most the share that it left out.
    """

    top_k: int = 0
    """Number of most likely tokens to keep; 0 or less: all."""
    top_p: float = 1.0
    """Probability that the most likely tokens must reach together."""
    banned: tuple[int, ...] = ()
    """Tokens that are excluded before anything else."""
    banned_early: tuple[int, ...] = ()
    """Tokens that are also excluded where a response must not end yet; see while_early."""
    min_p: float = 0.0
    """Probability of the least likely token, as a share of the most likely one's; 0: any."""

    @property
    def active(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0 or bool(self.banned)

    @property
    def ranks(self) -> bool:
        """Return whether tokens are inside by their rank among all tokens."""
        return self.top_k > 0 or self.top_p < 1.0

    @property
    def while_early(self) -> Self:
        """Return the restriction at the tokens of a response before the smallest allowed length."""
        banned = tuple(sorted({*self.banned, *self.banned_early}))
        return replace(self, banned=banned, banned_early=())

    def __call__(self, logits: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return `logits` [t, V] with -inf outside of the part.

        The tokens `keep` [t, K] stay, if they are not negative.
        """
        if keep is not None:
            keep = torch.where(keep < 0, logits.shape[-1], keep)
        outside = self.outside(logits, self.threshold(logits), keep=keep)
        return logits.masked_fill_(outside, -torch.inf)

    def outside(
        self, logits: Tensor, threshold: Tensor, *, first: int = 0, keep: Tensor | None = None
    ) -> Tensor:
        """Return [t, v] bool: tokens that are banned or below the threshold [t, 1].

        `logits` [t, v] start at token `first` of the vocabulary. `keep` [t, K] are positions among
        the v that stay inside; v itself stands for no token.
        """
        outside = logits < threshold
        for start, end in runs(self.banned):
            outside[:, max(start - first, 0) : max(end - first, 0)] = True
        if keep is not None:  # positions that are no token go to an extra column
            outside = torch.nn.functional.pad(outside, (0, 1)).scatter_(-1, keep, False)[:, :-1]
        return outside

    def threshold(self, logits: Tensor, *, first: int = 0) -> Tensor:
        """Return the smallest of the logits [t, V] that belongs to the part, in float32: [t, 1].

        First comes min p, then top k, then top p of what is left, as in vLLM. Without top k and top
        p, the logits may be some of the vocabulary, from token `first` on: the largest threshold of
        all shards is the whole's.
        """
        threshold = torch.full((len(logits), 1), -torch.inf, device=logits.device)
        if self.banned and (self.ranks or self.min_p > 0):
            logits = logits.masked_fill(self.outside(logits, threshold, first=first), -torch.inf)
        if self.min_p > 0 and logits.shape[-1]:
            threshold = logits.amax(-1, keepdim=True).float() + math.log(self.min_p)
        if self.top_k > 0:
            kth = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            threshold = torch.maximum(threshold, kth)
        if self.top_p < 1.0 and (self.top_k > 0 or self.min_p > 0):
            logits = logits.masked_fill(logits < threshold, -torch.inf)

        if self.top_p < 1.0:
            threshold = nucleus_threshold(logits, self.top_p)
        return threshold


ALL = Truncation()


@lru_cache(maxsize=64)
def without_padding(truncation: Truncation, vocabulary: int) -> tuple[int, Truncation]:
    """Cut off the banned ids at the end of the vocabulary, once for all batches.

    Return the number of ids that are left, and the truncation of these. The rest are rows of
    padding that no token has, so the logits need not be computed.
    """
    for start, end in runs(truncation.banned):
        if start < vocabulary <= end:
            banned = tuple(token for token in truncation.banned if token < start)
            return start, replace(truncation, banned=banned)
    return vocabulary, truncation


@lru_cache(maxsize=64)
def runs(token_ids: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the first id and the end of each run of consecutive ids, in order."""
    found: list[tuple[int, int]] = []
    for token in sorted(set(token_ids)):
        if found and found[-1][1] == token:
            found[-1] = (found[-1][0], token + 1)
        else:
            found.append((token, token + 1))
    return tuple(found)


def nucleus_threshold(logits: Tensor, top_p: float) -> Tensor:
    """Return the smallest logit inside the nucleus, from logits [t, V] float32: [t, 1].

    The tokens above it have less than `top_p` of the probability. Instead of sorting the
    vocabulary, it sums over it 32 times: float32 numbers are ordered like their keys, so a
    bisection from -inf to the largest logit finds the threshold.
    """
    if logits.device.type == "cpu":
        rows = max(1, HOST_BLOCK // logits.shape[-1])
    else:
        rows = max(1, len(logits))
    return torch.cat([_bisect_threshold(chunk, top_p) for chunk in logits.split(rows)])


def _bisect_threshold(logits: Tensor, top_p: float) -> Tensor:
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp_()
    target_mass = top_p * weights.sum(-1, keepdim=True)
    above = torch.empty_like(logits)

    high = float_keys(top)  # belongs to the part
    low = float_keys(torch.full_like(top, -torch.inf))  # does not belong to it
    for _ in range(32):
        middle = (low + high) // 2
        torch.gt(logits, floats_of(middle), out=above)
        inside = above.mul_(weights).sum(-1, keepdim=True) < target_mass
        low = torch.where(inside, low, middle)
        high = torch.where(inside, middle, high)

    return floats_of(high)


def float_keys(values: Tensor) -> Tensor:
    """Return integers of 32 bits in the order of float32 `values`, as int64.

    They are a float's own bits, flipped where it is negative.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: a zero has no sign
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()


def floats_of(keys: Tensor) -> Tensor:
    """Return the float32 numbers that have these keys."""
    bits = keys.int()
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).view(torch.float32)
