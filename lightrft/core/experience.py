"""Turn scored samples into the experience that each rank trains on.

ExperienceMaker writes samples as flat columns, compares their rewards, balances the sequences over
the ranks, and lets the stages of the run fill the other columns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from lightrft.core.advantages import CompareRewards, Stage
from lightrft.core.batch import Experience, TrainingPlan
from lightrft.core.groups import RewardTable, measure_groups
from lightrft.core.losses import sequence_sums
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Sample
from lightrft.core.strategy import DataRanks, Strategy


@dataclass(frozen=True, slots=True)
class LocalSamples:
    """This rank's samples as experience, before sequences move between ranks."""

    experience: Experience
    rows: list[Sample]
    """[N] sample of each sequence."""
    table: RewardTable
    numbers: Tensor
    """[N] int64: the response that each sequence belongs to, counted over all ranks."""
    data: DataRanks


LocalStage = Callable[[LocalSamples], None]
"""Masks local samples, or sets columns of the experience. All ranks call it."""


def flatten(
    samples: Sequence[Sample], *, first_row: int = 0, prompts: Sequence[Sequence[int]] | None = None
) -> Experience:
    """Concatenate prompts and responses into one experience; tokens that were sampled are learned.

    Rows are numbered from `first_row` on. `prompts` are the tokens of each sample's prompt as the
    trained model reads them; None: as the engine does.
    """
    lengths: list[int] = []
    tokens: list[int] = []
    learned: list[bool] = []
    logprobs: list[float] = []
    for index, sample in enumerate(samples):
        prompt = sample.prompt.token_ids if prompts is None else prompts[index]
        count = len(sample.token_ids)
        lengths.append(len(prompt) + count)
        tokens += [*prompt, *sample.token_ids]
        logprobs += [*[0.0] * len(prompt), *sample.logprobs]
        # Only sampled tokens have a probability under the policy; observations of episodes have
        # none.
        sampled = sample.episode.sampled if sample.episode else [True] * count
        learned += [False] * len(prompt) + ([False] * count if sample.masked else sampled)

    return Experience(
        lengths=torch.tensor(lengths, dtype=torch.int64),
        input_ids=torch.tensor(tokens, dtype=torch.int64),
        loss_mask=torch.tensor(learned, dtype=torch.bool),
        rows=torch.arange(first_row, first_row + len(samples)),
        groups=torch.tensor([sample.group for sample in samples], dtype=torch.int64),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        engine_logprobs=torch.tensor(logprobs, dtype=torch.float32),
    )


@dataclass(eq=False)
class ExperienceMaker:
    """Turns this rank's samples into the experience that this rank will train on."""

    strategy: Strategy
    compare: CompareRewards
    """Finds the advantages of rewards."""
    stages: Sequence[Stage]
    """Run in order on the balanced experience, when rewards have been compared."""
    _: KW_ONLY
    minibatch_size: int
    """Number of samples of an optimizer step, over all ranks."""
    epochs: int = 1
    """How often a step uses each sample."""
    local_stages: Sequence[LocalStage] = ()
    """Run in order on this rank's samples, before rewards are compared."""
    flatten: Callable[..., Experience] = flatten
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Limits on micro-batches, for the strategy."""

    def __call__(self, samples: list[Sample], metrics: Metrics) -> TrainingPlan:
        """Return this rank's share of the experience of all ranks' samples."""
        data = self.strategy.data
        groups = data.gather([sample.group for sample in samples])
        first = sum(map(len, groups[: data.rank]))
        experience = self.flatten(samples)
        experience.rows = numbers_of_rows(groups, data.rank)

        # Every rank gets the rewards of all, so a group may lie on several ranks.
        table = self.compare.gather(data, samples, first_row=first)
        numbers = torch.arange(first, first + len(samples))
        local = LocalSamples(experience, samples, table, numbers, data)
        advantages = self.advantages(local, metrics)
        experience.reward_advantages = place_at_tokens(advantages, samples, experience)
        return self.planned(experience, metrics)

    def advantages(self, local: LocalSamples, metrics: Metrics) -> Tensor:
        """Run the local stages, and return the advantage of each of this rank's rewards: [M]."""
        for stage in self.local_stages:
            stage(local)

        table = local.table
        advantages = self.compare(table)[table.local]
        if local.data.rank == 0:
            measure_groups(*table.totals(), metrics)
        return advantages

    def planned(
        self, experience: Experience, metrics: Metrics, units: Tensor | None = None
    ) -> TrainingPlan:
        """Move sequences so that all ranks have equal work, and run the stages.

        Sequences with the same number in `units` [N] stay in one optimizer step.
        """
        experience, minibatches = self.strategy.redistribute(
            experience, minibatch_size=self.minibatch_size, units=units, **self.limits
        )
        plan = TrainingPlan(experience, minibatches, self.epochs)
        for stage in self.stages:
            for name in stage.reads:
                if getattr(experience, name, None) is None:
                    raise ValueError(
                        f"{type(stage).__name__} needs the column {name!r}, and no stage before sets it"
                    )
            stage(plan, metrics)

        # Nothing reads these columns after the stages, so they need not be moved.
        experience.advantages = cast(Tensor, experience.advantages).float()
        experience.reward_advantages = None
        experience.entropy = None
        measure_experience(experience, metrics)
        return plan


def numbers_of_rows(groups: Sequence[Sequence[int]], rank: int) -> Tensor:
    """Return the numbers of a rank's rows, [N] int64; `groups` are of the samples of all ranks.

    Numbers count over all ranks in the order of groups. Neither the rows of an optimizer step nor
    the first of several equal tokens therefore depends on which rank has a group.
    """
    order = torch.tensor([*chain.from_iterable(groups)], dtype=torch.int64).argsort(stable=True)
    numbers = torch.empty_like(order)
    numbers[order] = torch.arange(len(order))
    first = sum(map(len, groups[:rank]))
    return numbers[first : first + len(groups[rank])]


def place_at_tokens(values: Tensor, rows: Sequence[Sample], experience: Experience) -> Tensor:
    """Put values [M], one for each reward of the rows, at the tokens that earned it: [T] float32.

    The result is 0 elsewhere. If a token is not learned, such as one of an observation, the value
    goes to the last learned token before it: returns are sums over learned tokens, and the tokens
    before led to the reward. The value is dropped if no token before it is learned.
    """
    ends = experience.offsets.tolist()[1:]
    # A reward at -1 comes before anything was sampled, so it has no token to go to.
    indices = torch.tensor(
        [
            end - len(row.token_ids) + token if token >= 0 else -1
            for end, row in zip(ends, rows, strict=True)
            for token, _ in row.steps
        ],
        dtype=torch.int64,
    )
    values = values.float()[indices >= 0]
    indices = indices[indices >= 0]
    result = torch.zeros(experience.num_tokens)
    if not len(indices):
        return result

    # for each token, the latest learned token so far in the sequence, or -1
    tokens = torch.arange(experience.num_tokens)
    latest = torch.where(experience.loss_mask, tokens, -1).cummax(0).values
    latest = torch.where(latest >= experience.offsets[experience.sequence_ids], latest, -1)
    indices = latest[indices]
    return result.index_add(0, indices[indices >= 0], values[indices >= 0])


def measure_experience(experience: Experience, metrics: Metrics) -> None:
    """Measure this rank's experience: advantages of learned tokens, and masked responses."""
    advantages = cast(Tensor, experience.advantages)
    learned = experience.loss_mask
    metrics.mean("rollout/advantage", advantages, learned)
    metrics.std("rollout/advantage_std", advantages, learned)
    metrics.min("rollout/advantage_min", advantages, learned)
    metrics.max("rollout/advantage_max", advantages, learned)
    metrics.mean("rollout/advantage_abs", advantages.abs(), learned)
    metrics.mean("rollout/left_out", (sequence_sums(learned.float(), experience) == 0).float())
