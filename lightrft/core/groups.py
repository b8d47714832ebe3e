"""Groups of responses to one prompt: as they grow, as they are compared, and as they are measured.

Every rank gets the rewards of all ranks, because estimators compare them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Self

import torch
from torch import Tensor

from lightrft.core.metrics import Metrics
from lightrft.core.samples import RIGHT, Prompt, Sample
from lightrft.core.strategy import DataRanks

SOLVED = ("0", "to_25", "to_50", "to_75", "below_100", "100")
"""Names of the buckets of a group's share of right samples: 0, up to 25 %, up to 50 %, up to 75 %,
below 100 %, and 100 %."""


@dataclass(slots=True)
class Group:
    """The responses to one prompt, from first token to last, over as many steps as they take."""

    number: int
    """Number of the group in the whole run, in the order of drawing."""
    row: int
    """Index of the prompt among all prompts."""
    samples: list[Sample]
    others: list[Sample] = field(default_factory=list)
    """Responses that are generated and scored like the samples, and that nobody learns from."""
    responses: list[Sample] = field(init=False)
    """All responses that are generated and scored."""
    slots: range = field(init=False)
    """Slots of all responses."""

    def __post_init__(self) -> None:
        self.responses = self.samples + self.others
        self.slots = range(len(self.responses))

    @classmethod
    def begin(cls, number: int, row: int, prompt: Prompt, count: int, *, others: int = 0) -> Self:
        responses = [Sample(prompt, number, [], [], "", None) for _ in range(count + others)]
        return cls(number, row, responses[:count], responses[count:])

    @property
    def prompt(self) -> Prompt:
        return self.samples[0].prompt

    @property
    def complete(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.responses)


# -- the rewards of all ranks


REWARD_COLUMNS = ("row", "group", "reward", "length", "response_length")
"""Columns of every table of rewards."""
RewardColumn = Callable[[Sample], Sequence[float]]
"""Function that returns a number for each reward of a sample."""


@dataclass(frozen=True, slots=True)
class RewardTable:
    """The rewards of all ranks in rank order, in columns [M] float64.

    A response has one reward, or several: one for each rewarded step. The columns are

        row              index of the response, counted over all ranks
        group            number of the response's group
        reward
        length           number of tokens that the reward is for: those since the reward before
        response_length  number of tokens of the response, at its last reward; 0 at the others

    and the columns that an estimator asks for.
    """

    columns: Mapping[str, Tensor]
    local: slice
    """Rewards of this rank."""

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @classmethod
    def share(
        cls,
        data: DataRanks,
        samples: Sequence[Sample],
        *,
        first_row: int,
        further: Mapping[str, RewardColumn] | None = None,
    ) -> Self:
        """Gather the rewards of all ranks; the first sample of this rank is row `first_row`.

        It takes one collective, or two if a rank has more rewards than ever before. All ranks have
        the same names in `further`, the columns beside those of every table.
        """
        further = further or {}
        lines: list[tuple[float, ...]] = []
        for row, sample in enumerate(samples, first_row):
            columns = [column(sample) for column in further.values()]
            steps = sample.steps
            ends = [*[0] * (len(steps) - 1), len(sample.token_ids)]
            before = 0
            for index, (token, reward) in enumerate(steps):
                named = [column[index] for column in columns]
                length = token + 1 - before
                lines.append((row, sample.group, reward, length, ends[index], *named))
                before = token + 1

        header = (*REWARD_COLUMNS, *further)
        table = torch.tensor(lines, dtype=torch.float64).reshape(-1, len(header))
        tables, _ = data.gather_rows(table.view(torch.int64))  # the same bits
        first = sum(map(len, tables[: data.rank]))
        values = torch.cat(tables).view(torch.float64).unbind(1)
        return cls(dict(zip(header, values, strict=True)), slice(first, first + len(lines)))

    def totals(self) -> tuple[Tensor, Tensor]:
        """Return the total reward and the group of each response of all ranks: [N], [N]."""
        row = self["row"].unique(return_inverse=True)[1]
        count = int(row.max()) + 1 if len(row) else 0
        rewards = self["reward"].new_zeros(count).index_add(0, row, self["reward"])
        return rewards, self["group"].new_zeros(count).index_copy(0, row, self["group"])


def data_column(name: str, sample: Sample) -> list[float]:
    """Return the number in a column of the data, the same for all rewards of a sample.

    Raises ValueError, with the row, if there is none.
    """
    prompt = sample.prompt
    if problem := number_problem(name, prompt):
        raise ValueError(f"{prompt.location or f'row {prompt.index}'}: {problem}")
    return [float(prompt.columns[name])] * len(sample.steps)


def number_problem(name: str, prompt: Prompt) -> str | None:
    """Return why a column of a row of the data is no number; None if it is one."""
    value = prompt.columns.get(name)
    if isinstance(value, Real) and math.isfinite(value):
        return None
    return (
        f"the estimator asks for a number in the column {name!r}, and it is {value!r:.50}; the"
        f" columns are {', '.join(prompt.columns) or 'none'}"
    )


# -- measured


def measure_groups(rewards: Tensor, groups: Tensor, metrics: Metrics) -> None:
    """Measure how many groups are solved to what degree, and how many have no signal.

    `rewards` [N] and `groups` [N] cover the responses of all ranks. Only totals are compared.
    """
    names, member, sizes = groups.unique(return_inverse=True, return_counts=True)
    zeros = rewards.new_zeros(len(names))
    best = zeros.scatter_reduce(0, member, rewards, "amax", include_self=False)
    worst = zeros.scatter_reduce(0, member, rewards, "amin", include_self=False)
    metrics.mean("rollout/groups_without_signal", (best == worst).float())
    solved = zeros.index_add(0, member, (rewards > RIGHT).to(rewards.dtype)) / sizes
    bins = (4 * solved).ceil() + (solved == 1)
    for index, name in enumerate(SOLVED):
        metrics.mean(f"rollout/groups_solved_{name}", (bins == index).float())


def measure_samples(samples: list[Sample], version: int, metrics: Metrics) -> None:
    """Measure this rank's samples; `version` is the version of the engine's newest weights."""
    rewards = torch.tensor([sample.reward for sample in samples])
    lengths = torch.tensor([float(len(sample.token_ids)) for sample in samples])
    staleness = version - torch.tensor(
        [each for sample in samples for each in sample.weight_versions], dtype=torch.float64
    )

    for name, values in (("rollout/reward", rewards), ("rollout/response_length", lengths)):
        metrics.mean(name, values)
        metrics.std(f"{name}_std", values)
        metrics.min(f"{name}_min", values)
        metrics.max(f"{name}_max", values)

    for sample in samples:
        for name, reward in sample.reward_components.items():
            metrics.mean(f"rollout/reward_of_{name}", reward)

    metrics.mean("rollout/truncated", torch.tensor([float(sample.truncated) for sample in samples]))
    metrics.mean("rollout/staleness", staleness)
    metrics.max("rollout/staleness_max", staleness)
    metrics.mean("rollout/off_policy_tokens", staleness > 0)
    metrics.sum("rollout/tokens", sum(row.length for sample in samples for row in sample.rows))
