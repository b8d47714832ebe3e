"""Reward models: learn to score the preferred of two answers to one prompt higher."""

from collections.abc import Sequence

from lightrft.algorithms.preferences.reward import RewardObjective
from lightrft.algorithms.roles.reward_model import RewardModel
from lightrft.app.run.run import Run
from lightrft.app.trainer.tasks.pairs import local_pairs, pair_denominator
from lightrft.core.role import LossTerm
from lightrft.core.samples import Prompt


def term_of_pairs(
    run: Run,
    role: RewardModel,
    objective: RewardObjective,
    pairs: Sequence[Prompt],
    *,
    max_tokens: int,
) -> LossTerm:
    """Learn from pairs of answers; the loss is the mean over all pairs of a step."""
    batch, rows, _ = local_pairs(run, pairs, max_tokens=max_tokens)
    denominator = pair_denominator(pairs, run.strategy.device)
    return LossTerm(batch, rows, objective, denominator, role.scores_of_heads)
