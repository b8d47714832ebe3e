"""Rows whose reward cannot be earned honestly: the prompt of a row with another row's label."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from lightrft.config.errors import ConfigError
from lightrft.core.engine import derived_seed
from lightrft.core.order import Order
from lightrft.core.samples import Prompt
from lightrft.extras.ledger.answers import Reader, labels_of

COUNTED_LABELS = 10_000
"""Number of rows from which the chance of a guess is computed."""


class CanaryRow(NamedTuple):
    """A prompt with a reward that cannot be earned."""

    prompt: Prompt
    true_label: Any = None
    """The label that the row has in the data; None for rows of --canary_data."""


class CanaryRows:
    """The canaries of a run in their order, a function of the seed."""

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, *, swaps: bool, answer: Reader | None = None
    ):
        """Set up the rows. `answer` is what the reward reads as an answer.

        With `swaps` each prompt gets the label of another row. Otherwise `prompts` are rows whose
        reward cannot be earned as they are. Raises ConfigError if there are no two labels.
        """
        self.prompts = prompts
        self.seed = derived_seed(seed, "canaries")
        self.order = Order(len(prompts), self.seed)
        self.swaps = swaps
        self.answer = answer
        self.chance = 0.0
        """Reward in [0, 1] of the best guess that does not read the prompt."""
        if swaps:
            self._check_labels()

    def __getitem__(self, position: int) -> CanaryRow:
        """Return the canary at a position; after the last row the first one comes again."""
        row = self.order.rows(position % len(self.prompts), 1)[0]
        prompt = self.prompts[row]
        if not self.swaps:
            return CanaryRow(prompt)

        label = prompt.columns["label"]
        right = self._answers(prompt)
        first = derived_seed(self.seed, row) % len(self.prompts)
        rows = (
            self.prompts[(first + index) % len(self.prompts)] for index in range(len(self.prompts))
        )
        false = next(
            other
            for other in rows
            if (answers := self._answers(other)) and right.isdisjoint(answers)
        )
        columns = prompt.columns | {"label": false.columns["label"]}
        return CanaryRow(replace(prompt, columns=columns), label)

    def _answers(self, prompt: Prompt) -> frozenset[str]:
        return frozenset(map(plain, labels_of(prompt.columns.get("label"), self.answer)))

    def _check_labels(self) -> None:
        rows = islice(self.prompts, COUNTED_LABELS)
        labels = Counter(map(self._answers, rows))
        if frozenset() in labels or len(labels) < 2:
            raise ConfigError(
                "--canaries gives prompts the labels of other rows, and in --prompt_data a row has"
                " none, or no two differ: name the column with --label_key, or give rows whose"
                " reward cannot be earned with --canary_data"
            )
        self.chance = max(labels.values()) / labels.total()


def plain(answer: str) -> str:
    """Return an answer so that equal ones are equal texts: 5, 5.0 and " 5 " are "5"."""
    text = answer.strip().casefold()
    try:
        return format(float(text), "g")
    except ValueError:
        return text
