"""Reward models: learn to score the preferred of two answers higher, or each step of an answer."""

from collections.abc import Sequence

from lightrft.algorithms.preferences.process_reward import step_objective
from lightrft.algorithms.preferences.reward import RewardObjective
from lightrft.algorithms.roles.reward_model import RewardModel
from lightrft.app.run.run import Run
from lightrft.app.trainer.tasks.examples import known_denominator, local_batch
from lightrft.app.trainer.tasks.pairs import local_pairs, pair_denominator
from lightrft.core.role import LossTerm
from lightrft.core.samples import Prompt
from lightrft.data.step_labels import step_batch


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


def term_of_steps(
    run: Run, role: RewardModel, answers: Sequence[Prompt], *, max_tokens: int
) -> LossTerm:
    """Learn from judged steps of answers; the loss is the mean over all steps of the answers."""
    batch, rows, _ = local_batch(run, step_batch, answers, max_tokens=max_tokens)
    num_steps = sum(len(answer.columns["targets"]) for answer in answers)
    denominator = known_denominator(num_steps, len(answers), run.strategy.device)

    return LossTerm(batch, rows, step_objective, denominator, role.scores_of_tokens)
