"""Reward models: learn to score the preferred of two answers to one prompt higher."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.algorithms.preferences.reward import RewardObjective
from lightrft.algorithms.roles.reward_model import RewardModel
from lightrft.app.trainer.tasks.pairs import local_pairs, pair_denominator
from lightrft.config.sections import TrainSection
from lightrft.core.role import LossTerm
from lightrft.core.samples import Expand, Prompt


@dataclass(eq=False)
class RewardModelTask:
    """Learns from pairs of answers; the loss is the mean over all pairs of a step."""

    role: RewardModel
    objective: RewardObjective
    train: TrainSection
    expand: Expand | None = None
    """Function that expands prompts with media."""

    def term(self, pairs: Sequence[Prompt], *, max_tokens: int) -> LossTerm:
        """Return this rank's share of the loss on all ranks' pairs."""
        strategy = self.role.strategy
        batch, rows, _ = local_pairs(
            pairs, strategy.mesh.data, self.train, max_tokens=max_tokens, expand=self.expand
        )
        denominator = pair_denominator(pairs, strategy.device)
        return LossTerm(batch, rows, self.objective, denominator, self.role.scores_of_heads)
