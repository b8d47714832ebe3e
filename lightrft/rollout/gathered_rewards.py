"""Rewards of all ranks, gathered on every rank, for estimators and reward shaping."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from lightrft.algorithms.advantage import solved_share
from lightrft.parallel.collectives import Axis
from lightrft.types import Experience, Sample


@dataclass(frozen=True, slots=True)
class GatheredRewards:
    """The rewards of all ranks in rank order, [M] float64 each.

    A response has one reward, or several: one for each rewarded step.
    """

    rows: Tensor
    """Index of the response, counted over all ranks."""
    groups: Tensor
    rewards: Tensor
    lengths: Tensor
    """Number of tokens that the reward is for: those since the reward before."""
    response_lengths: Tensor
    """Number of tokens of the response, at its last reward; 0 at the others."""
    greedy: Tensor
    """Reward of the greedy response to the prompt, at a response's last reward; 0 elsewhere."""
    local: slice
    """Rewards of this rank."""
    components: dict[str, Tensor]
    """Named parts of each reward with their weights, if they were asked for.

    A response whose reward has no parts, or that has several rewards, has the part `reward`.
    """

    @classmethod
    def share(
        cls, axis: Axis, samples: list[Sample], *, first_row: int, components: bool = False
    ) -> Self:
        """Gather the rewards of all ranks; the first sample of this rank is row `first_row`.

        It takes one collective, or two if a rank has more rewards than ever before. The
        `components` take one more, for their names.
        """
        names: list[str] = []
        if components:
            mine = {name for sample in samples for name in _components(sample, sample.reward)}
            names = sorted(set().union(*axis.gather(mine)))

        lines = [
            line
            for row, sample in enumerate(samples, first_row)
            for line in _lines(row, sample, names)
        ]
        width = len(fields(cls)) - 2 + len(names)
        table = torch.tensor(lines, dtype=torch.float64).reshape(-1, width)
        parts, _ = axis.gather_rows(table.view(torch.int64))  # the same bits
        first = sum(map(len, parts[: axis.rank]))
        columns = torch.cat(parts).view(torch.float64).unbind(1)
        numbers = columns[: width - len(names)]
        of_names = dict(zip(names, columns[width - len(names) :], strict=True))
        return cls(*numbers, slice(first, first + len(lines)), of_names)

    def totals(self) -> tuple[Tensor, Tensor]:
        """Return the total reward and the group of each response of all ranks: [N], [N]."""
        row = self._row
        count = int(row.max()) + 1 if len(row) else 0
        rewards = self.rewards.new_zeros(count).index_add(0, row, self.rewards)
        return rewards, self.groups.new_zeros(count).index_copy(0, row, self.groups)

    def solved_shares(self) -> Tensor:
        """Return, for each reward, the share of right responses in the group: [M]."""
        return solved_share(*self.totals())[self._row]

    @property
    def _row(self) -> Tensor:
        """Return the index of the response that each reward belongs to, [M] int64."""
        return self.rows.unique(return_inverse=True)[1]


def _components(sample: Sample, reward: float) -> dict[str, float]:
    named = sample.reward_parts if sample.token_rewards is None else {}
    return named or {"reward": reward}


def _lines(row: int, sample: Sample, names: list[str]) -> Iterator[tuple[float, ...]]:
    before = 0
    for place, (token, reward) in enumerate(sample.steps, 1):
        length, greedy = (
            (len(sample.token_ids), sample.greedy_reward)
            if place == len(sample.steps)
            else (0, 0.0)
        )
        parts = _components(sample, reward) if names else {}
        of_names = [parts.get(name, 0.0) for name in names]
        yield row, sample.group, reward, token + 1 - before, length, greedy, *of_names
        before = token + 1


def place_at_tokens(values: Tensor, samples: list[Sample], experience: Experience) -> Tensor:
    """Put the values [M] of this rank's rewards at the tokens that earned them: [T] float32.

    The result is 0 elsewhere. The experience has a row for each sample and for each of
    the sample's branches. A branch gets the sum of the sample's values at the branch's last token.
    If a token is not learned, such as one of an observation, the value goes to the last learned
    token before it: returns are sums over learned tokens, and the tokens before led to the reward.
    The value is dropped if no token before it is learned.
    """
    result = torch.zeros(experience.num_tokens)
    ends = experience.offsets.tolist()
    row = 0
    line = 0
    places = []
    lines = []

    for sample in samples:
        steps = sample.steps
        start = ends[row] + sample.prompt.num_tokens
        lines_of_sample = range(line, line + len(steps))
        # A reward at -1 comes before anything was sampled, so it has no token to go to.
        places += [start + token if token >= 0 else -1 for token, _ in steps]
        lines += [[each] for each in lines_of_sample]
        row = row + len(sample.rows)
        line = lines_of_sample.stop
        places += [ends[branch] - 1 for branch in range(row - len(sample.rows) + 2, row + 1)]
        lines += [list(lines_of_sample)] * (len(sample.rows) - 1)

    sums = (
        torch.tensor([sum(numbers[each] for each in one) for one in lines])
        if (numbers := values.tolist())
        else values
    )
    places = torch.tensor(places, dtype=torch.int64)
    sums = sums.float()[places >= 0]
    places = _latest_learned(experience)[places[places >= 0]]

    return result.index_add(0, places[places >= 0], sums[places >= 0])


def _latest_learned(experience: Experience) -> Tensor:
    """Return, for each token, the latest learned token so far in the sequence: [T] int64, or -1."""
    tokens = torch.arange(experience.num_tokens)
    if not len(tokens):
        return tokens
    latest = torch.where(experience.loss_mask, tokens, -1).cummax(0).values
    return torch.where(latest >= experience.offsets[experience.sequence_ids], latest, -1)
