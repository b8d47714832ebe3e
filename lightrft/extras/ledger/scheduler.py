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
        self.counts = np.zeros((3, len(self.prompts)))
        """Right and wrong responses to each row, older ones counting less, and the number of its
        last group, [3, rows]."""

    def _rows(self, count: int, left_out: set[int]) -> tuple[list[int], int]:
        generator = np.random.default_rng(derived_seed(self.seed, "ledger", self.position))
        rates = generator.beta(1 + self.counts[0], 1 + self.counts[1])
        n = self.section.n_samples_per_prompt
        with np.errstate(divide="ignore"):
            keys = np.log(1 - rates**n - (1 - rates) ** n) + generator.gumbel(size=len(rates))
        ranked = [row for row in np.argsort(-keys).tolist() if row not in left_out]
        return [ranked[index % len(ranked)] for index in range(count)], self.position + count

    def scored(self, groups: list[Group]) -> list[GroupOutcome]:
        outcomes = super().scored(groups)
        n = self.section.n_samples_per_prompt
        for outcome in outcomes:
            *counts, number = self.counts[:, outcome.row]
            if outcome.number > number:  # --dynamic_sampling tells a group twice
                new = n * np.array([outcome.solved, 1 - outcome.solved])
                self.counts[:, outcome.row] = *KEPT_SHARE * np.array(counts) + new, outcome.number
        return outcomes

    def snapshot(self) -> Callable[[], None]:
        rollback = super().snapshot()
        before = self.counts.copy()

        def undo() -> None:
            rollback()
            self.counts = before

        return undo

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"by_signal": self.counts.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; a checkpoint of another scheduler says nothing of the signals."""
        counts = state.pop("by_signal", self.counts)
        super().load_state_dict(state)
        self.counts = np.array(counts)
