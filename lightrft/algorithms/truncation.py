"""Sampling from a part of the vocabulary: the one definition that trainer and engine follow.

Shapes: t tokens, V vocabulary, v of it on this rank, K tokens asked for at each position.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Truncation:
    """The probabilities of the rest are 0, those of the part sum to 1.

    A token that is asked for always belongs to the part: it was sampled, so only rounding can have put it outside. All tokens
    that are as likely as the last one inside are inside too; an engine may leave some of those out, and then its log-probs are
    larger by at most their share of the part.
    """

    top_k: int = 0
    """Only the k most likely tokens; 0 or less: all."""
    top_p: float = 1.0
    """Only the most likely tokens that reach this probability together."""
    banned: tuple[int, ...] = ()
    """Tokens that are left out before anything else."""

    @property
    def active(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or bool(self.banned)

    def __call__(self, logits: Tensor, kept: Tensor | None = None) -> Tensor:
        """`logits` [t, V] with -inf outside of the part; `kept` [t, K] stay, as far as they are not negative."""
        outside = self.outside(logits, self.threshold(logits))
        if kept is not None:
            kept = torch.where(kept < 0, logits.shape[-1], kept)  # what nobody asked for falls into one more column
            outside = torch.nn.functional.pad(outside, (0, 1)).scatter_(-1, kept, False)[:, :-1]
        return logits.masked_fill_(outside, -torch.inf)

    def outside(self, logits: Tensor, threshold: Tensor, *, first: int = 0) -> Tensor:
        """[t, v] bool: below the threshold [t, 1], or banned. `logits` [t, v] are of the tokens from `first` on."""
        outside = logits < threshold
        for token in self.banned:
            if 0 <= token - first < logits.shape[-1]:
                outside[:, token - first] = True
        return outside

    def threshold(self, logits: Tensor) -> Tensor:
        """The smallest of the logits [t, V] that belongs to the part: [t, 1]."""
        threshold = torch.full((len(logits), 1), -torch.inf, device=logits.device)
        if self.banned and (self.top_k > 0 or self.top_p < 1.0):
            logits = logits.masked_fill(self.outside(logits, threshold), -torch.inf)
        if self.top_k > 0:
            threshold = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
        if self.top_p < 1.0:
            ordered = logits.masked_fill(logits < threshold, -torch.inf).sort(descending=True).values
            before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
            before[:, 0] = 0.0
            last = (before < self.top_p).sum(-1, keepdim=True) - 1
            threshold = torch.maximum(threshold, ordered.gather(-1, last))
        return threshold


ALL = Truncation()
