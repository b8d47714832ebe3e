"""Let prompts rest for some epochs if they were too easy or too hard (--curriculum)."""

from lightrft.algorithms.rollout.rollout import History


class Curriculum:
    """Decides by the share of right responses which prompts rest."""

    def __init__(self, bounds: list[float], epochs_of_rest: int, history: History):
        self.least, self.most = bounds
        self.epochs_of_rest = epochs_of_rest
        self.history = history

    def rests(self, row: int, epoch: int) -> bool:
        """Return True if the prompt of this row is passed over in this epoch."""
        last = int(self.history.epochs[row])
        if last < 0 or epoch - last >= self.epochs_of_rest:
            return False
        return not self.least <= self.history.solved[row] <= self.most
