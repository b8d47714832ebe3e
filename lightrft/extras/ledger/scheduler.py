"""Draw prompts in proportion to the signal that they are expected to have (--scheduler ledger)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lightrft.algorithms.rollout.rollout import GroupOutcome
from lightrft.algorithms.schedulers.rounds import Rounds
from lightrft.core.engine import derived_seed
from lightrft.core.groups import Group

KEPT_SHARE = 0.7
"""Share of what is known of a row that its next draw leaves: the policy changes meanwhile."""


class DrawsBySignal(Rounds):
    """Draws each prompt with a probability in proportion to its expected signal.

    The share of right responses to a prompt has a Beta posterior. A rate p that is drawn from it
    (Thompson sampling) gives a group of n responses a signal with probability 1 - p^n - (1 - p)^n,
    and prompts are drawn without replacement in proportion to that. New prompts have the prior
    Beta(1, 1). All ranks draw the same, and a pass over the data need not contain every row.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        size = len(self.prompts)
        self.right, self.wrong = np.zeros(size), np.zeros(size)
        """Responses to each row, of which older ones count less."""
        self.numbers = np.zeros(size, dtype=np.int64)
        """Number of the last group of each row."""

    def _rows(self, count: int, left_out: set[int]) -> tuple[list[int], int]:
        generator = np.random.default_rng(derived_seed(self.seed, "ledger", self.position))
        rates = generator.beta(1 + self.right, 1 + self.wrong)
        n = self.section.n_samples_per_prompt
        with np.errstate(divide="ignore"):
            keys = np.log(1 - rates**n - (1 - rates) ** n) + generator.gumbel(size=len(rates))
        ranked = [row for row in np.argsort(-keys).tolist() if row not in left_out]
        rows = [ranked[index % len(ranked)] for index in range(count)]
        return rows, self.position + count

    def scored(self, groups: list[Group]) -> list[GroupOutcome]:
        outcomes = super().scored(groups)
        for outcome in outcomes:
            row = outcome.row
            if self.numbers[row] == outcome.number:  # --dynamic_sampling has told it before
                continue
            self.numbers[row] = outcome.number
            n = self.section.n_samples_per_prompt
            self.right[row] = KEPT_SHARE * self.right[row] + n * outcome.solved
            self.wrong[row] = KEPT_SHARE * self.wrong[row] + n * (1 - outcome.solved)
        return outcomes

    def snapshot(self) -> Callable[[], None]:
        rollback = super().snapshot()
        before = self.right.copy(), self.wrong.copy(), self.numbers.copy()

        def undo() -> None:
            rollback()
            self.right, self.wrong, self.numbers = before

        return undo

    def state_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name).tolist() for name in ("right", "wrong", "numbers")}
        return super().state_dict() | {"by_signal": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; a checkpoint of another scheduler says nothing of the signals."""
        counts = state.pop("by_signal", {})
        super().load_state_dict(state)
        for name, values in counts.items():
            setattr(self, name, np.array(values, dtype=getattr(self, name).dtype))
