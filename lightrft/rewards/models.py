"""Scores of reward models for whole responses, or for the steps.

They are added to the rewards of the reward function.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightrft.algorithms.roles.reward_model import RewardModel
from lightrft.config.references import chosen_labels
from lightrft.core.samples import Answer, Expand, Sample
from lightrft.data.conversations import flat_columns
from lightrft.rewards.steps import StepRewards, TokenRewards

FUNCTION = "function"
"""Name of the component of a reward that the reward function returned as one number."""


@dataclass(frozen=True)
class ScoringModel:
    """Reward model with the weight of the scores."""

    label: str
    """Name of its metric, and of the model in the column --reward_key."""
    model: RewardModel
    weight: float = 1.0
    steps: StepRewards | None = None
    """Rewards of the steps of a response, for a process reward model.

    None: the score at the last token is the reward.
    """


@dataclass(eq=False)
class ModelRewards:
    """Reward models that score prompt and response, as tokens."""

    models: Sequence[ScoringModel]
    key: str | None = None
    """Column that names the models of the row, by label; None: all models score every row."""
    expand: Expand | None = None
    """Function for prompts with media."""
    _early: dict[tuple[str, int], tuple[Sample, Tensor]] = field(default_factory=dict)
    """(label of a model, id() of a sample) -> the sample and the scores. While the sample is
    kept, no other object gets its id."""

    def __call__(self, samples: list[Sample]) -> None:
        """Add the scores of every model to the rewards of samples.

        All ranks call it together, with any number of samples. Raises ValueError, on all ranks, for
        a score that is not finite.
        """
        self.compute_early(samples)
        for scorer in self.models:
            for sample in self._scored_samples(scorer, samples):
                row = self._early[scorer.label, id(sample)][1]
                if scorer.steps is None:
                    add_score(sample, scorer.label, scorer.weight * row.item())
                elif sample.token_ids:
                    of_tokens = scorer.steps(sample.token_ids, row)
                    _add_to_tokens(
                        sample,
                        scorer.label,
                        [None if one is None else scorer.weight * one for one in of_tokens],
                    )

        self._early.clear()

    def compute_early(self, samples: list[Sample]) -> None:
        """Compute the scores of samples that have none yet.

        The call that adds them does not compute them again. All ranks call it together, with any
        number of samples.
        """
        for scorer in self.models:
            scored = [
                sample
                for sample in self._scored_samples(scorer, samples)
                if (scorer.label, id(sample)) not in self._early
            ]
            answered = [
                (sample.prompt, Answer(sample.token_ids, [True] * len(sample.token_ids)))
                for sample in scored
            ]

            columns = flat_columns(answered, self.expand)
            # All ranks take part, also a rank whose samples this model does not score.
            rows = scorer.model.get_flat_scores(columns).split(columns["lengths"].tolist())
            counts = [1 if scorer.steps is None else len(sample.token_ids) for sample in scored]
            scores = [row[len(row) - count :] for row, count in zip(rows, counts, strict=True)]
            _check(scorer, scores)
            early = zip(scored, scores, strict=True)
            self._early |= {(scorer.label, id(sample)): (sample, row) for sample, row in early}

    def _scored_samples(self, scorer: ScoringModel, samples: list[Sample]) -> list[Sample]:
        """Return the samples that a model scores."""
        return [
            sample
            for sample in samples
            if scorer.label in chosen_labels(sample.prompt.columns, self.key, {scorer.label})
        ]


def _check(scorer: ScoringModel, scores: list[Tensor]) -> None:
    wrong = torch.tensor([float(sum(not row.isfinite().all() for row in scores))])
    if count := int(scorer.model.strategy.mesh.data.sum(wrong)):
        raise ValueError(
            f"the reward model {scorer.label} returned scores that are not finite for {count}"
            " responses"
        )


def add_score(sample: Sample, name: str, score: float) -> None:
    """Add a score for the whole response to the reward.

    If tokens have rewards, it is added at the last one.
    """
    components = sample.reward_components or {FUNCTION: sample.reward}
    sample.reward_components = components | {name: score}
    sample.reward += score
    if sample.token_rewards is not None:
        *before, last = sample.token_rewards
        sample.token_rewards = [*before, (last or 0.0) + score]


def _add_to_tokens(sample: Sample, name: str, rewards: TokenRewards) -> None:
    """Add rewards of tokens; a reward that was one number until now moves to the last token."""
    before = sample.token_rewards or [*[None] * (len(rewards) - 1), sample.reward]
    total = sum(value for value in rewards if value is not None)
    components = sample.reward_components or {FUNCTION: sample.reward}
    sample.reward_components = components | {name: total}
    sample.reward += total
    sample.token_rewards = [
        None if old is None and new is None else (old or 0.0) + (new or 0.0)
        for old, new in zip(before, rewards, strict=True)
    ]
