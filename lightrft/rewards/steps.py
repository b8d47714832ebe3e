"""Steps of a response, and their rewards from the scores of a process reward model (Lightman et al., arXiv 2305.20050)."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.engine.stops import BYTES_OF_A_CHARACTER

TokenRewards = list[float | None]
"""A reward for each token of a response; None for tokens without one."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that is only a part of a character."""


def _sum(correct: list[float]) -> list[float]:
    return correct


def _mean(correct: list[float]) -> list[float]:
    return [value / len(correct) for value in correct]


def _difference(correct: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *correct])]


def _minimum(correct: list[float]) -> list[float | None]:
    worst = correct.index(min(correct))
    return [value if place == worst else None for place, value in enumerate(correct)]


FORMS: dict[str, Callable[[list[float]], Sequence[float | None]]] = {
    "sum": _sum, "mean": _mean, "difference": _difference, "min": _minimum,
}  # fmt: skip
"""Values of --step_rewards -> function from the probabilities that the steps are correct to their rewards."""


class StepRewards:
    """Rewards at the last token of each step of a response; a separator ends a step and belongs to it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, separator: str, form: str):
        """Set up the rewards. `form` is one of FORMS."""
        self.tokenizer, self.separator, self.form = tokenizer, separator, FORMS[form]
        self.window = BYTES_OF_A_CHARACTER * len(separator)
        self._may_end: dict[int, bool] = {}

    def __call__(self, token_ids: Sequence[int], scores: Tensor) -> TokenRewards:
        """Return the rewards [t] of the tokens from the scores [t], the logits of the probability that a step is correct."""
        ends = self.ends(token_ids)
        rewards: TokenRewards = [None] * len(token_ids)
        for end, reward in zip(ends, self.form(torch.sigmoid(scores.float())[ends].tolist()), strict=True):
            rewards[end] = reward
        return rewards

    def ends(self, token_ids: Sequence[int]) -> list[int]:
        """Return the index of the last token of each step. Text after the last separator is a step, unless it is only spaces.

        A step that would consist of spaces belongs to the one before it.
        """
        ends: list[int] = []
        start = 0
        for place, token in enumerate(token_ids):
            if place < len(token_ids) - 1 and not self._ends_separator(token, token_ids[max(start, place - self.window) : place]):
                continue
            if ends and not self._text(token_ids[start : place + 1]).strip():
                ends[-1] = place
            else:
                ends.append(place)
            start = place + 1
        return ends

    def _ends_separator(self, token: int, before: Sequence[int]) -> bool:
        if token not in self._may_end:
            text = self._text([token])
            self._may_end[token] = self.separator[-1] in text or INCOMPLETE in text
        return self._may_end[token] and self.separator in self._text([*before, token])

    def _text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
