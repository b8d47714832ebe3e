"""Tasks of the package reasoning-gym in several turns: after a wrong answer comes another try."""

from typing import Any

from lightrft.rewards.verifiers.reasoning_gym import score_of_answer

WRONG = "\nWrong.\n"
"""Observation after an answer that is not right."""
DISCOUNT = 0.8


class SeveralAttempts:
    """Answer a task until an answer is right; after a wrong one the model may answer again.

    It reads "Wrong." in between. The value of an answer is the score, 1 if it is right, times 0.8
    for each answer before it; the reward of an episode is its largest value. The columns are the
    ones of `--prompt_data reasoning_gym:NAME`.
    """

    def reset(
        self, answer: str | None, metadata: Any, options: Any = None, **columns: object
    ) -> None:
        self.row = (answer, metadata, options)
        self.worth = 1.0
        self.reward = 0.0

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Score an answer; async because the time limit of a score needs the main thread."""
        score = score_of_answer(action, *self.row)
        more = max(score * self.worth - self.reward, 0.0)
        self.reward = self.reward + more
        self.worth = self.worth * DISCOUNT
        return WRONG, more, score == 1
