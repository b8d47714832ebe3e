"""How engines sample completions: every parameter of a request."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch
from torch import Tensor

from lightrft.config.values import COLDEST, HOTTEST
from lightrft.core.engine import Decoding
from lightrft.models.logits.truncation import Truncation

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Sampling(Decoding):
    """Sampling parameters of a call, or of one request.

    First, banned tokens are removed, and logits are divided by the temperature. Then three limits
    apply one after another: tokens with less than min p of the largest probability are left out,
    then all but the top k, and then all but the top p. The remaining probabilities are normalised
    to 1. Greedy samples, at temperature 0, ignore the three limits.
    """

    seed: int = 0
    """Seed of a call, for requests without seeds. It is equal within an engine's tensor-parallel
    group, and different between replicas and steps."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, as the tokenizer's end token does; the token itself is kept."""
    top_p: float = 1.0
    """Cumulative probability of the most likely tokens that are kept."""
    top_k: int = 0
    """How many of the most likely tokens are kept; 0: all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; they may include special tokens. The response's last token is
    the one that completes a string."""
    first_token_temperature: float | None = None
    """Temperature of the first token only, for diversity: FIRE (Chen et al., arXiv 2410.21236).
    None: `temperature`."""
    min_tokens: int = 0
    """Fewest tokens of a response. Until then, tokens that would end it are banned."""
    end_token_ids: tuple[int, ...] = ()
    """All tokens that end a response. resolved() sets them if there is a smallest length."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that are never sampled. Placeholders of media, and ids that the tokenizer does not
    have, are always banned in addition."""
    min_p: float = 0.0
    """Least probability of a token that is kept, as a share of the largest one; 0: any."""

    @property
    def num_draws(self) -> int:
        """Return how many samples to compute: greedy ones are all the same."""
        return self.n if self.temperature else 1

    def of_samples(self, of_draws: list[Value]) -> list[Value]:
        """Return a value for each sample, given one for each draw."""
        if len(of_draws) == self.n:
            return of_draws
        return [deepcopy(of_draws[0]) for _ in range(self.n)]

    @property
    def truncation(self) -> Truncation:
        """Return the restriction of the vocabulary that is sampled from."""
        return Truncation(
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            banned=self.banned_token_ids,
            banned_early=self.end_token_ids,
        )

    def after(self, num_tokens: int) -> Self:
        """Return the parameters for the rest of a response that has tokens already.

        Two options concern the first tokens alone.
        """
        rest = replace(self, max_tokens=self.max_tokens - num_tokens)
        if not num_tokens:
            return rest
        left = max(self.min_tokens - num_tokens, 0)
        return replace(rest, first_token_temperature=None, min_tokens=left)

    def resolved(self, never_sampled: tuple[int, ...], ends: Iterable[int] = ()) -> Self:
        """Return the parameters for adapters, with all banned tokens listed.

        What greedy sampling ignores gets default values. `ends` are the model's own end tokens.
        """
        early = sorted({*ends, *self.stop_token_ids}) if self.min_tokens else ()
        banned = tuple(sorted({*self.banned_token_ids, *never_sampled}))
        greedy = {"top_p": 1.0, "top_k": 0, "min_p": 0.0} if self.temperature == 0 else {}
        return replace(self, banned_token_ids=banned, end_token_ids=tuple(early), **greedy)

    def problem(self, vocabulary_size: int | None = None) -> str | None:
        """Return why the parameters are invalid; None if they are valid."""
        rules = {
            "n and max_tokens must be at least 1": self.n >= 1 and self.max_tokens >= 1,
            f"the temperature must be 0 or from {COLDEST:g} to {HOTTEST:g}": self.temperature == 0
            or COLDEST <= self.temperature <= HOTTEST,
            "top_p must be above 0 and at most 1": 0 < self.top_p <= 1,
            "min_p must be from 0 to 1": 0 <= self.min_p <= 1,
            "top_k must not be negative": self.top_k >= 0,
            "min_tokens must not be negative": self.min_tokens >= 0,
            "min_tokens bans tokens, and no stop strings": not (self.min_tokens and self.stop),
            "stop strings must not be empty": "" not in self.stop,
            "first_token_temperature must be above 0": self.first_token_temperature is None
            or COLDEST <= self.first_token_temperature <= HOTTEST,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        outside = out_of_vocabulary((*self.stop_token_ids, *self.banned_token_ids), vocabulary_size)
        if outside is not None:
            broken += [f"token {outside} is not in the vocabulary of {vocabulary_size}"]

        return f"cannot sample with {self}: {'; '.join(broken)}" if broken else None


def drawn_tokens(logprobs: Tensor, points: Tensor) -> Tensor:
    """Draw a token for each row of logprobs [R, V]: [R, 1] int64.

    The token is the inverse of the cumulative distribution at the row's point [R] in [0, 1),
    float64.
    """
    # float32 would lose the tail of a large vocabulary.
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding must not select beyond the last token.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    drawn = torch.minimum(points[:, None] * total, below_total)
    return torch.searchsorted(cumulative, drawn, right=True)


def out_of_vocabulary(token_ids: Iterable[int], vocabulary_size: int | None) -> int | None:
    """Return the first token outside of the vocabulary, or None; an unknown size allows all."""
    if vocabulary_size is None:
        return None
    return next((token for token in token_ids if not 0 <= token < vocabulary_size), None)
