"""Process reward models: a score at the end of each step of an answer."""

from lightrft.algorithms.preferences.process_reward import step_objective
from lightrft.algorithms.roles.reward_model import RewardModel
from lightrft.app.trainer.tasks.examples import known_denominator, plan_local_rows
from lightrft.config.sections import TrainSection
from lightrft.core.role import LossTerm
from lightrft.core.samples import Expand, Prompt
from lightrft.data.step_labels import step_batch


class ProcessRewardTask:
    """Learns from judged steps of answers; the loss is the mean over all steps of the answers."""

    def __init__(self, role: RewardModel, train: TrainSection, expand: Expand | None = None):
        """Set up the task. `expand` expands prompts with media."""
        self.role = role
        self.train = train
        self.expand = expand

    def term(self, answers: list[Prompt], *, max_tokens: int) -> LossTerm:
        """Return this rank's share of the loss on all ranks' answers."""
        strategy = self.role.strategy
        data = strategy.mesh.data
        local_rows, rows = plan_local_rows(answers, data, self.train, max_tokens=max_tokens)
        batch = step_batch([answers[row] for row in local_rows], local_rows, self.expand)
        num_steps = sum(len(answer.columns["targets"]) for answer in answers)
        denominator = known_denominator(num_steps, len(answers), strategy.device)

        return LossTerm(batch, rows, step_objective, denominator, self.role.scores_of_tokens)
