"""Example environments that a tiny model learns on a laptop."""

from lightrft.rewards.functions import right_answers


class GuessNumber:
    """Guess the digit in the column `label`.

    After each guess the answer is < if the digit is smaller, > if it is larger. The reward is 1 for
    a right first guess and 0.15 less for each further turn; without a right guess, it is 0.05 for
    each turn that was a digit.
    """

    def reset(self, label: object, **columns: object) -> None:
        (self.digit,) = right_answers(label)
        self.digits = 0
        self.reward = 0.0

    def step(self, action: str) -> tuple[str, float, bool]:
        if action == self.digit:
            return "", 1 - 0.15 * self.digits - self.reward, True
        if len(action) != 1 or action not in "0123456789":
            return "?", 0.0, False
        self.digits = self.digits + 1
        self.reward = self.reward + 0.05
        return "<" if self.digit < action else ">", 0.05, False
