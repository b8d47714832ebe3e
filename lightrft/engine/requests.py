"""What an engine is asked: prompts, and how to sample their continuations."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from lightrft.algorithms.truncation import Truncation
from lightrft.config import RolloutSection
from lightrft.types import Expanded

MEDIA = {"images": "image", "videos": "video", "audios": "audio"}
"""Where a request has them -> what placeholders, flags, and prompts for one engine call them."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample: the requests of one call, or one of them.

    Banned tokens are taken out first, then the temperature divides the logits, then the top k stay, then the top p of those;
    what stays is normalised to 1.
    """

    n: int = 1
    """Samples of each prompt; they share its prefill."""
    max_tokens: int = 1024
    temperature: float = 1.0
    """0 is greedy, and top_p and top_k are nothing to it."""
    seed: int = 0
    """Of a call, for the requests that bring no seeds of their own. Equal inside one engine's tensor-parallel group, different
    between replicas and steps."""
    stop_token_ids: tuple[int, ...] = ()
    """These end a response, as the tokenizer's end token does; the token itself is kept."""
    top_p: float = 1.0
    """Only the most likely tokens that reach this probability together."""
    top_k: int = 0
    """Only the k most likely tokens; 0: all."""
    stop: tuple[str, ...] = ()
    """Texts, special tokens counted, that end a response. Its last token is the one that completes one of them."""
    first_token_temperature: float | None = None
    """Temperature of the first token alone, for variety: FIRE (Chen et al., arXiv 2410.21236). None: as the others."""
    banned_token_ids: tuple[int, ...] = ()
    """Never sampled. The placeholders of images, videos and audio never are, whatever stands here."""

    @classmethod
    def of(cls, section: RolloutSection, **own: Any) -> Self:
        """Take the values of the flags, and `own` in place of some of them."""
        from_flags = {
            "n": section.n_samples_per_prompt, "max_tokens": section.generate_max_len, "temperature": section.temperature,
            "top_p": section.top_p, "top_k": section.top_k, "stop": tuple(section.stop),
            "stop_token_ids": tuple(section.stop_token_ids), "first_token_temperature": section.first_token_temperature,
        }  # fmt: skip
        return cls(**from_flags | own)

    @classmethod
    def greedy(cls, section: RolloutSection, **own: Any) -> Self:
        """The most likely response, once, within the same limits."""
        return cls.of(section, **{"n": 1, "temperature": 0.0, "first_token_temperature": None} | own)

    @property
    def num_draws(self) -> int:
        """Samples to compute: a greedy answer is the same every time."""
        return self.n if self.temperature else 1

    @property
    def truncation(self) -> Truncation:
        """The part of the vocabulary that it samples from."""
        return Truncation(top_k=self.top_k, top_p=self.top_p, banned=self.banned_token_ids)

    def resolved(self, placeholders: tuple[int, ...]) -> Self:
        """As adapters see it: every banned token named, and what is nothing to greedy sampling left out."""
        banned = tuple(sorted({*self.banned_token_ids, *placeholders}))
        greedy = {"top_p": 1.0, "top_k": 0} if self.temperature == 0 else {}
        return replace(self, banned_token_ids=banned, **greedy)

    def problem(self, vocabulary_size: int | None = None) -> str | None:
        """Why nobody can sample so; None when it is possible."""
        rules = {
            "n and max_tokens are at least 1": self.n >= 1 and self.max_tokens >= 1,
            "the temperature is not negative": self.temperature >= 0,
            "top_p is above 0 and at most 1": 0 < self.top_p <= 1,
            "top_k is not negative": self.top_k >= 0,
            "stop strings are not empty": "" not in self.stop,
            "first_token_temperature is above 0": self.first_token_temperature is None or self.first_token_temperature > 0,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        outside = strange((*self.stop_token_ids, *self.banned_token_ids), vocabulary_size)
        broken += [f"token {outside} is not in the vocabulary of {vocabulary_size}"] if outside is not None else []
        return f"cannot sample with {self}: {'; '.join(broken)}" if broken else None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete.

        Request([4, 86, 104, 97, 116, 63], multi_modal={"images": [image]})      # 4 stands for an image
    """

    token_ids: list[int]
    """With one placeholder for each image, video or clip, as a chat template writes it."""
    multi_modal: dict[str, Any] = field(default_factory=dict)
    """`images`, `videos`, `audios`, each in the order of its placeholders and in any of the forms of media.py."""
    sampling: Sampling | None = None
    """Its own, instead of the call's; the seed is the call's."""
    seeds: tuple[int, ...] = ()
    """One for each sample, from derived_seed(): it alone decides the sample's noise, whatever engine or batch draws it. Without
    any, they are derived from the call's seed and the place of the request among those of the call."""
    expanded: Expanded | None = None
    """An engine sets it while it answers a request with media."""

    @property
    def prompt(self) -> list[int]:
        """What the model reads."""
        return self.expanded.token_ids if self.expanded else self.token_ids

    def followed_by(self, token_ids: list[int]) -> Self:
        """The same prompt with more text behind it."""
        expanded = self.expanded and replace(self.expanded, token_ids=self.expanded.token_ids + token_ids)
        return replace(self, token_ids=self.token_ids + token_ids, expanded=expanded)


def derived_seed(*parts: int | str) -> int:
    """Return a seed of 63 bits that depends on all parts and their order, and is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def strange(token_ids: Iterable[int], vocabulary_size: int | None) -> int | None:
    """The first token outside of the vocabulary, if its size is known."""
    if vocabulary_size is None:
        return None
    return next((token for token in token_ids if not 0 <= token < vocabulary_size), None)
