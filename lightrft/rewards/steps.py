"""Rewards for the steps of a response, from the scores of a process reward model.

Lightman et al., arXiv 2305.20050.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.data.step_ends import StepEnds

TokenRewards = list[float | None]
"""A reward for each token of a response; None for tokens without one."""


def _sum(correct: list[float]) -> list[float]:
    return correct


def _mean(correct: list[float]) -> list[float]:
    return [value / len(correct) for value in correct]


def _difference(correct: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *correct])]


def _minimum(correct: list[float]) -> list[float | None]:
    worst = correct.index(min(correct))
    return [value if index == worst else None for index, value in enumerate(correct)]


STEP_FORMS: dict[str, Callable[[list[float]], Sequence[float | None]]] = {
    "sum": _sum,
    "mean": _mean,
    "difference": _difference,
    "min": _minimum,
}
"""--step_rewards -> function from the probabilities that the steps are correct to rewards."""


class StepRewards:
    """Rewards at the last token of each step of a response."""

    def __init__(self, tokenizer: Tokenizer, separator: str, form: str):
        """Set up the rewards.

        `separator` ends a step and belongs to it; `form` is one of STEP_FORMS.
        """
        self.ends = StepEnds(tokenizer, separator)
        self.form = STEP_FORMS[form]

    def __call__(self, token_ids: Sequence[int], scores: Tensor) -> TokenRewards:
        """Return the rewards [t] of the tokens from the scores [t].

        A score is the logit of the probability that a step is correct.
        """
        ends = self.ends(token_ids)
        rewards: TokenRewards = [None] * len(token_ids)
        for end, reward in zip(
            ends, self.form(torch.sigmoid(scores.float())[ends].tolist()), strict=True
        ):
            rewards[end] = reward
        return rewards
