"""Rows whose reward cannot be earned honestly: the prompt of a row with another row's label."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from lightrft.config.errors import ConfigError
from lightrft.core.engine import derived_seed
from lightrft.core.order import Order
from lightrft.core.samples import Prompt

COUNTED_LABELS = 10_000
"""Number of rows from which the chance of a guess is computed."""


@dataclass(frozen=True, slots=True)
class CanaryRow:
    """A prompt with a reward that cannot be earned."""

    prompt: Prompt
    true_label: Any = None
    """The label that the row has in the data; None for rows of --canary_data."""


class CanaryRows:
    """The canaries of a run in their order, a function of the seed."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, *, swaps: bool):
        """Set up the rows.

        With `swaps` each prompt gets the label of another row. Otherwise `prompts` are rows whose
        reward cannot be earned as they are. Raises ConfigError if there are no two labels.
        """
        self.prompts = prompts
        self.seed = derived_seed(seed, "canaries")
        self.order = Order(len(prompts), self.seed)
        self.swaps = swaps
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
        first = derived_seed(self.seed, row) % len(self.prompts)
        others = (
            self.prompts[(first + index) % len(self.prompts)].columns["label"]
            for index in range(len(self.prompts))
        )
        false = next(other for other in others if plain(other) != plain(label))
        return CanaryRow(replace(prompt, columns=prompt.columns | {"label": false}), label)

    def _check_labels(self) -> None:
        rows = islice(self.prompts, COUNTED_LABELS)
        labels = Counter(plain(prompt.columns.get("label")) for prompt in rows)
        if None in labels or len(labels) < 2:
            problem = (
                "a row has none" if None in labels else f"all are {next(iter(labels), 'missing')}"
            )
            raise ConfigError(
                f"--canaries gives prompts the labels of other rows, and in --prompt_data {problem}:"
                " name the column with --label_key, or give rows whose reward cannot be earned with"
                " --canary_data"
            )
        self.chance = max(labels.values()) / labels.total()


def plain(label: Any) -> str | None:
    """Return a label so that equal answers are equal texts: 5, 5.0 and " 5 " are "5"."""
    if label is None:
        return None
    text = str(label).strip().casefold()
    try:
        return format(float(text), "g")
    except ValueError:
        return text
