"""Prompts of one or several data sets as one sequence, and the order that a run draws them in."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

from lightrft.core.order import Order
from lightrft.core.samples import Prompt
from lightrft.data.digests import digests_of_pieces
from lightrft.data.loader import Blend, draws_of_epoch


@dataclass(frozen=True, slots=True)
class LoadedSet:
    """Prompts of one data set."""

    name: str
    prompts: Sequence[Prompt]
    probability: float | None = None
    """Probability that a row is drawn from this data set; None if each row is drawn once in an
    epoch.
    """
    examples: Sequence[Prompt] | None = None
    """Prompts with all sets of columns that occur; None for all prompts."""


class PromptSet(Sequence[Prompt]):
    """Prompts of all data sets, one after another. A slice is a list, a sum another set."""

    def __init__(
        self,
        sets: list[LoadedSet],
        digests: list[str] | None = None,
        description: Sequence[str] = (),
    ):
        """Set up the sequence. `digests` has the digests of the pieces, if they are known.

        `description` says in a line for each data set how its rows were understood.
        """
        self.sets = sets
        self.description = description
        self._digests = digests
        self._ends = list(accumulate(len(one.prompts) for one in sets))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        number = bisect_right(self._ends, row)
        return self.sets[number].prompts[row - self._ends[number]]  # counted from the set's end

    def __add__(self, other: Self) -> Self:
        return type(self)(self.sets + other.sets)

    @property
    def examples(self) -> list[Prompt]:
        """Return a prompt of each kind, for checks that would take long on all of them."""
        return [
            prompt
            for one in self.sets
            for prompt in (one.prompts if one.examples is None else one.examples)
        ]

    @property
    def digests(self) -> list[str]:
        """Return digests_of_pieces() of all rows."""
        return digests_of_pieces(self) if self._digests is None else self._digests

    @property
    def probabilities(self) -> list[float]:
        """Return the probability of each data set; empty if each row is drawn once in an epoch."""
        probabilities = [one.probability for one in self.sets if one.probability is not None]
        return probabilities if len(probabilities) > 1 else []

    @property
    def draws_of_epoch(self) -> int:
        """Return the number of rows that are drawn in an epoch."""
        if self.probabilities:
            return draws_of_epoch([len(one.prompts) for one in self.sets], self.probabilities)
        return len(self)

    def order(self, data_order: Callable[[int], Order], seed: int) -> Order | Blend:
        """Return the order of the rows; `data_order` returns the order of a number of rows."""
        if not self.probabilities:
            return data_order(len(self))
        return Blend([data_order(len(one.prompts)) for one in self.sets], self.probabilities, seed)

    def repetitions(self) -> list[str]:
        """Return a sentence for each data set of a blend.

        It says how often the rows are drawn in an epoch, on average.
        """
        return [
            f"{one.name}: {len(one.prompts)} rows with probability {probability:.4g}, each drawn"
            f" {self.draws_of_epoch * probability / len(one.prompts):.3g} times in an epoch of"
            f" {self.draws_of_epoch} rows"
            for one, probability in zip(
                self.sets, self.probabilities or [None] * len(self.sets), strict=True
            )
            if probability is not None
        ]
