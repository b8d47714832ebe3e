"""What only some runs ask of the experience: columns, branches of episodes, and early outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from lightrft.algorithms.roles.padded import rows_of_ranks
from lightrft.algorithms.roles.role import DistributedRole
from lightrft.algorithms.rollout.episode_roles import role_of, role_rewards
from lightrft.config.errors import ConfigError
from lightrft.core.advantages import Stage
from lightrft.core.batch import Experience, RoutedShape, Rows, TrainingPlan
from lightrft.core.experience import (
    ExperienceMaker,
    LocalSamples,
    flatten,
    numbers_of_rows,
    place_at_tokens,
)
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Expand, Expanded, Sample

# -- columns


def flatten_for_run(
    samples: list[Sample],
    *,
    first_row: int = 0,
    expand: Expand | None = None,
    first_token_apart: bool = False,
    min_tokens: int = 0,
    routed: RoutedShape | None = None,
) -> Experience:
    """Flatten samples, with the columns that the options of a run need.

    `expand` expands prompts with media; without it all prompts are text. With `first_token_apart`
    the first token after a prompt is not learned, because it was sampled from another distribution;
    first tokens of later turns are learned. The first `min_tokens` of a response were sampled
    without the tokens that would end it. `routed`: the experience has the experts that the engine
    chose.
    """
    expanded: list[Expanded] = []
    if expand:  # once for a group
        of_groups = {sample.group: sample.prompt for sample in samples}
        of_groups = {group: expand(prompt) for group, prompt in of_groups.items()}
        expanded = [of_groups[sample.group] for sample in samples]
    prompts = [each.token_ids for each in expanded] if expand else None
    experience = flatten(samples, first_row=first_row, prompts=prompts)
    counts = torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.int64)
    begins = experience.offsets[1:] - counts

    if first_token_apart:
        experience.loss_mask[begins[counts > 0]] = False
    if min_tokens:
        begins = begins[experience.sequence_ids]
        tokens = torch.arange(experience.num_tokens)
        experience.early = (begins <= tokens) & (tokens < begins + min_tokens)
    if routed:
        experience.experts = _chosen_experts(experience.lengths.tolist(), samples, routed)
    if expand:
        experience.media = [each.features for each in expanded]
        experience.tower_tokens = torch.tensor([each.tower_tokens for each in expanded])
    return experience


def _chosen_experts(lengths: list[int], samples: list[Sample], shape: RoutedShape) -> Tensor:
    """Return the experts that the engine chose for each token of samples: [T, layers, k]."""
    experts = shape.empty(sum(lengths))
    for start, sample in zip(accumulate(lengths, initial=0), samples, strict=False):
        if sample.experts is not None:
            record = torch.from_numpy(sample.experts.astype(np.int16)).to(shape.dtype)
            experts[start : start + len(record)] = record
    return experts


# -- branches


def with_branches(samples: list[Sample]) -> list[Sample]:
    """List each sample followed by the branches of the episode; they get the role's reward."""
    for sample in samples:
        rewards = role_rewards(sample)
        for branch in sample.rows[1:]:
            branch.reward = rewards.get(role_of(branch), sample.reward)
            branch.masked = sample.masked
            branch.finish_reason = sample.finish_reason
    return [row for sample in samples for row in sample.rows]


def compared_with_others(sample: Sample) -> dict[str, Sample]:
    """Return role -> its first conversation in an episode, with the reward of the role.

    Raises ConfigError if roles have rewards, and steps too.
    """
    if sample.token_rewards is not None and sample.episode and sample.episode.role_rewards:
        raise ConfigError(
            "the agent rewards roles, and another reward rewards steps: remove that from --reward"
        )

    rewards = role_rewards(sample)
    firsts = {role_of(row): row for row in reversed(sample.rows)}
    given = {"reward_components": sample.reward_components, "greedy_reward": sample.greedy_reward}
    return {
        role: replace(row, reward=rewards.get(role, sample.reward), **given)
        for role, row in firsts.items()
    }


@dataclass(eq=False)
class BranchExperience(ExperienceMaker):
    """Learns from the branches of episodes too, in the optimizer step of their sample."""

    across_roles: bool = False
    """Compare the rewards of different roles of a group, too."""

    def __call__(self, samples: list[Sample], metrics: Metrics) -> TrainingPlan:
        data = self.strategy.data
        # the group and the role of each row, for each sample of each rank
        shares = data.gather(
            [[(sample.group, role_of(row)) for row in sample.rows] for sample in samples]
        )
        groups = [[[group for group, _ in rows] for rows in share] for share in shares]
        rows = with_branches(samples)
        counts = torch.tensor([len(sample.rows) for sample in samples], dtype=torch.int64)
        sample_index = torch.repeat_interleave(counts)
        experience = self.flatten(rows)
        experience.rows = numbers_of_rows([[*chain(*share)] for share in groups], data.rank)
        units = numbers_of_rows([[each[0] for each in share] for share in groups], data.rank)

        # A role is compared like a sample: usually there is one in all episodes.
        compared = {
            (number, role): first
            for number, sample in enumerate(samples)
            for role, first in compared_with_others(sample).items()
        }
        roles = sorted({role for share in shares for rows in share for _, role in rows})
        if not self.across_roles:
            for (_, role), first in compared.items():
                first.group = first.group * len(roles) + roles.index(role)
        before = sum(len(set(rows)) for share in shares[: data.rank] for rows in share)
        table = self.compare.gather(data, [*compared.values()], first_row=before)

        places = {key: place for place, key in enumerate(compared)}
        keys = [(int(number), role_of(row)) for number, row in zip(sample_index, rows, strict=True)]
        index = torch.tensor([places[key] for key in keys], dtype=torch.int64)
        local = LocalSamples(experience, rows, table, before + index, data)
        values = iter(self.advantages(local, metrics).tolist())
        found = {key: [next(values) for _ in first.steps] for key, first in compared.items()}
        # A branch gets the sum at the last token.
        of_rows = [
            value
            for row, key in zip(rows, keys, strict=True)
            for value in (found[key] if row.token_rewards is not None else [sum(found[key])])
        ]
        experience.reward_advantages = place_at_tokens(torch.tensor(of_rows), rows, experience)
        return self.planned(experience, metrics, units[sample_index])


# -- before the step (--overlap)


@dataclass
class EarlyOutputs:
    """Flattens samples, with outputs of models that were computed while others were generated."""

    role: DistributedRole
    """Role whose limits micro-batches have."""
    flatten: Callable[..., Experience]
    stages: Sequence[Stage]
    """Stages of the run. Those that need no other samples run early."""
    num_updates: int
    """How many optimizer steps use the samples of a step."""
    max_sequences: int | None
    """Most sequences of a micro-batch."""
    names: Sequence[str] = field(default=(), init=False)
    """Columns of Experience that were computed, the same on all ranks."""
    known: dict[int, tuple[Sample, list[Tensor]]] | None = field(default=None, init=False)
    """id() of a row -> the row and the values of these columns, one for each token.

    The row is kept alive, so no other object can get the same id. None until compute() was called
    in a step."""

    def compute(self, samples: list[Sample]) -> None:
        """Run the stages for some samples that are complete.

        All ranks call it together, each with samples of its own or none. Until the step ends, the
        calls must come from one thread or one after another.
        """
        self._compute(with_branches(samples))

    def __call__(self, rows: list[Sample]) -> Experience:
        """Return the experience of all rows of the step."""
        experience = self.flatten(rows)
        if self.known is not None:
            # Samples that were complete too late for the overlap are computed now, by all ranks.
            self._compute([row for row in rows if id(row) not in self.known])
            for index, name in enumerate(self.names):
                values = [self.known[id(row)][1][index] for row in rows]
                setattr(experience, name, torch.cat([torch.zeros(0), *values]))
            self.known = None
        return experience

    def _compute(self, rows: list[Sample]) -> None:
        strategy = self.role.strategy
        counts = strategy.data.gather(len(rows))
        flattened = self.flatten(rows, first_row=sum(counts[: strategy.data.rank]))

        def run(local: Experience, minibatches: list[Rows]) -> dict[str, Tensor]:
            plan = TrainingPlan(local, minibatches or [[]], self.num_updates)
            stages = [each for each in self.stages if each.depends_on_samples_alone]
            for stage in stages:
                stage(plan, Metrics())
            names = dict.fromkeys(name for stage in stages for name in stage.writes)
            return {name: value for name in names if (value := getattr(local, name)) is not None}

        limits = self.role.limits(self.max_sequences)
        columns = strategy.compute_tokens(flattened, rows_of_ranks(counts), run, **limits)
        if self.known is None:
            self.known = {}
            self.names = list(columns)
        pieces = [values.split(flattened.lengths.tolist()) for values in columns.values()]
        self.known |= {id(row): (row, values) for row, *values in zip(rows, *pieces, strict=True)}
