"""Turn scored samples into the experience that each rank trains on.

ExperienceMaker writes samples as flat columns, compares their rewards, balances the sequences over
the ranks, and lets the stages of the run fill the other columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from lightrft.config.sections import TrainSection
from lightrft.core.batch import Experience, RoutedShape
from lightrft.core.batches import TrainingPlan
from lightrft.core.losses import sequence_sums
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Expand, Expanded, Sample
from lightrft.roles.policy import Policy
from lightrft.rollout.groups import GatheredRewards, measure_groups
from lightrft.rollout.plan import LocalSamples, LocalStage, Stage

Compare = Callable[[GatheredRewards], Tensor]
"""Function that returns the advantage [M] of each reward of all ranks."""


class ExperienceMaker:
    """Turns this rank's samples into the experience that this rank will train on."""

    def __init__(
        self,
        policy: Policy,
        train: TrainSection,
        *,
        compare: Compare,
        stages: Sequence[Stage],
        flatten: Callable[..., Experience],
        local_stages: Sequence[LocalStage] = (),
        num_updates: int = 1,
        branches: bool = False,
        components: bool = False,
    ):
        """Set up the experience maker; stages.build.experience_maker() chooses the parts of a run.

        `compare` finds the advantages. `local_stages` run in order on this rank's own samples,
        before `compare`, and `stages` on the balanced experience, after it. `num_updates`: how many
        optimizer steps use the samples of a step; compute_early() needs it. `branches`: samples may
        have branches, and a sample's branches are learned in the same optimizer step as the sample.
        `components`: `compare` reads the named parts of rewards.
        """
        self.policy = policy
        self.train = train
        self.compare = compare
        self.stages = stages
        self.flatten = flatten
        self.local_stages = local_stages
        self.num_updates = num_updates
        self.branches = branches
        self.components = components
        self.data = policy.strategy.data
        self._precomputed: PrecomputedOutputs | None = None
        """Outputs of samples of the current step, once compute_early() was called."""

    def __call__(self, samples: list[Sample], metrics: Metrics) -> TrainingPlan:
        """Return this rank's part of the experience of all ranks' samples."""
        rows = with_branches(samples) if self.branches else samples
        # (group, number of rows) of each sample
        facts = [(sample.group, len(sample.rows)) for sample in samples]
        parts = self.data.gather(facts)
        first_sample = sum(map(len, parts[: self.data.rank]))
        experience = self.flatten(rows, first_row=0)  # the numbers of rows follow
        experience.rows, units = numbers_of_rows(parts, self.data.rank)
        if self._precomputed is not None:
            self._set_precomputed(experience, samples, rows)

        # Every rank gets the rewards of all, so a group may lie on several ranks.
        gathered = GatheredRewards.share(
            self.data,
            samples,
            first_row=first_sample,
            components=self.components,
            columns=self.compare.columns,
        )
        counts = torch.tensor([count for _, count in facts], dtype=torch.int64)
        numbers = first_sample + torch.repeat_interleave(counts)
        local = LocalSamples(experience, rows, gathered, numbers, self.data)
        for stage in self.local_stages:
            stage(local)

        advantages = self.compare(gathered)[gathered.local]
        experience.reward_advantages = place_at_tokens(advantages, samples, experience)
        if self.data.rank == 0:
            measure_groups(*gathered.totals(), metrics)

        # Sequences move between ranks so that all have equal work. Those with the same unit stay in
        # one optimizer step.
        experience, minibatches = self.policy.redistribute_flat(
            experience,
            self.train.train_batch_size,
            self.train.micro_train_batch_size,
            units=units if self.branches else None,
        )
        plan = TrainingPlan(experience, minibatches, self.train.max_epochs)
        for stage in self.stages:
            stage(plan, metrics)

        # Nothing reads these columns after the stages, so they need not be moved.
        experience = plan.experience
        experience.advantages = experience.advantages.float()
        experience.reward_advantages = None
        experience.entropy = None
        measure_experience(experience, metrics)
        return plan

    # -- before the step (--overlap)

    def compute_early(self, samples: list[Sample]) -> None:
        """Run the stages that need no other samples, for some samples that are complete.

        All ranks call it together, each with samples of its own or none. Until the step ends, the
        calls must come from one thread or one after another.
        """
        rows = with_branches(samples) if self.branches else samples
        counts = self.data.gather(len(rows))
        ends = list(accumulate(counts))
        owners = [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
        flattened = self.flatten(rows, first_row=ends[self.data.rank] - len(rows))

        store = self.policy.strategy.sample_store()
        part, minibatches = self.policy.redistribute_flat(
            flattened, None, self.train.micro_train_batch_size, store=store
        )
        plan = TrainingPlan(part, minibatches or [[]], self.num_updates)
        stages = [each for each in self.stages if each.depends_on_samples_alone]
        for stage in stages:
            stage(plan, Metrics())

        # The outputs go back to the ranks that have the samples.
        names = dict.fromkeys(name for stage in stages for name in stage.writes)
        outputs = {name: value for name in names if (value := getattr(part, name)) is not None}
        store.put(part.rows, part.lengths, tokens=outputs)
        store.move(owners, list(outputs))
        columns = store.get(flattened.rows, list(outputs))
        store.clear(flattened.rows.tolist())

        parts = [columns[name].split(flattened.lengths.tolist()) for name in outputs]
        self._precomputed = self._precomputed or PrecomputedOutputs(tuple(outputs), {})
        self._precomputed.parts.update(
            {id(sample): (sample, values) for sample, *values in zip(rows, *parts, strict=True)}
        )

    def _set_precomputed(
        self, experience: Experience, samples: list[Sample], rows: list[Sample]
    ) -> None:
        known = self._precomputed.parts
        # Samples that were complete too late for the overlap are computed now, by all ranks.
        self.compute_early([sample for sample in samples if id(sample) not in known])
        self._precomputed.set_columns(experience, rows)
        self._precomputed = None


# -- samples as columns


def flatten(
    samples: list[Sample],
    *,
    first_row: int,
    expand: Expand | None = None,
    first_token_apart: bool = False,
    min_tokens: int = 0,
    routed: RoutedShape | None = None,
) -> Experience:
    """Concatenate prompts and responses into one experience; tokens that were sampled are learned.

    Rows are numbered from `first_row` on. `expand` expands prompts with media; without it all
    prompts are text. With `first_token_apart` the first token after a prompt is not learned,
    because it was sampled from another distribution; first tokens of later turns are learned. The
    first `min_tokens` of a response were sampled without the tokens that would end it. `routed`:
    the experience has the experts that the engine chose.
    """
    expanded = _expand_prompts(samples, expand) if expand else None
    prompt_ids = [each.token_ids for each in expanded or (sample.prompt for sample in samples)]
    prompts = [len(ids) for ids in prompt_ids]
    lengths = [
        length + len(sample.token_ids) for length, sample in zip(prompts, samples, strict=True)
    ]
    masks = [_learned_mask(sample, first_token_apart) for sample in samples]
    learned = [
        one
        for length, mask in zip(prompts, masks, strict=True)
        for one in (*[False] * length, *mask)
    ]

    tokens = [
        token
        for ids, sample in zip(prompt_ids, samples, strict=True)
        for token in (*ids, *sample.token_ids)
    ]
    logprobs = [
        value
        for length, sample in zip(prompts, samples, strict=True)
        for value in (*[0.0] * length, *sample.logprobs)
    ]

    return Experience(
        lengths=torch.tensor(lengths, dtype=torch.int64),
        input_ids=torch.tensor(tokens, dtype=torch.int64),
        loss_mask=torch.tensor(learned, dtype=torch.bool),
        rows=torch.arange(first_row, first_row + len(samples)),
        groups=torch.tensor([sample.group for sample in samples], dtype=torch.int64),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        engine_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        early=_early_tokens(prompts, samples, min_tokens) if min_tokens else None,
        experts=_chosen_experts(lengths, samples, routed) if routed else None,
        media=[each.features for each in expanded] if expand else None,
        tower_tokens=torch.tensor([each.tower_tokens for each in expanded]) if expand else None,
    )


def _learned_mask(sample: Sample, first_token_apart: bool) -> list[bool]:
    """Return, for each token of the response, whether it is learned."""
    if sample.masked:
        return [False] * len(sample.token_ids)
    # Only sampled tokens have a probability under the policy; observations of episodes have none.
    sampled = sample.episode.sampled if sample.episode else [True] * len(sample.token_ids)
    return [not first_token_apart, *sampled[1:]] if sampled and sampled[0] else sampled


def _early_tokens(prompts: list[int], samples: list[Sample], min_tokens: int) -> Tensor:
    """Mark the first `min_tokens` of each response, [T] bool; `prompts` are prompt lengths."""
    early = [
        token < min_tokens
        for length, sample in zip(prompts, samples, strict=True)
        for token in (*[min_tokens] * length, *range(len(sample.token_ids)))
    ]
    return torch.tensor(early, dtype=torch.bool)


def _chosen_experts(lengths: list[int], samples: list[Sample], shape: RoutedShape) -> Tensor:
    """Return the experts that the engine chose for each token of samples: [T, layers, k]."""
    experts = shape.empty(sum(lengths))
    for start, sample in zip(accumulate(lengths, initial=0), samples, strict=False):
        if sample.experts is not None:
            record = torch.from_numpy(sample.experts.astype(np.int16)).to(shape.dtype)
            experts[start : start + len(record)] = record
    return experts


def _expand_prompts(samples: list[Sample], expand: Expand) -> list[Expanded]:
    """Expand each sample's prompt once for the whole group."""
    prompts = {sample.group: sample.prompt for sample in samples}
    read = {group: expand(prompt) for group, prompt in prompts.items()}
    return [read[sample.group] for sample in samples]


def numbers_of_rows(parts: Sequence[Sequence[tuple[int, int]]], rank: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of a rank's rows, and of the samples that they belong to: [N], [N] int64.

    `parts` has (group, number of rows) of the samples of all ranks. Numbers count over all ranks in
    the order of groups. Neither the rows of an optimizer step nor the first of several equal tokens
    therefore depends on which rank has a group.
    """
    samples = torch.tensor([*chain.from_iterable(parts)], dtype=torch.int64).reshape(-1, 2)
    order = samples[:, 0].argsort(stable=True)
    sizes = samples[order, 1]
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    starts = torch.empty_like(order)
    starts[order] = sizes.cumsum(0) - sizes

    first = sum(map(len, parts[:rank]))
    own = slice(first, first + len(parts[rank]))
    counts = samples[own, 1]
    before = (counts.cumsum(0) - counts).repeat_interleave(counts)
    units = places[own].repeat_interleave(counts)
    rows = starts[own].repeat_interleave(counts) + torch.arange(len(units)) - before
    return rows, units


def place_at_tokens(values: Tensor, samples: list[Sample], experience: Experience) -> Tensor:
    """Put the values [M] of this rank's rewards at the tokens that earned them: [T] float32.

    The result is 0 elsewhere. The experience has a row for each sample and for each branch of the
    sample. A branch gets the sum of the sample's values at the branch's last token.
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

    sums = values
    if numbers := values.tolist():
        sums = torch.tensor([sum(numbers[each] for each in one) for one in lines])
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


def measure_experience(experience: Experience, metrics: Metrics) -> None:
    """Measure this rank's experience: advantages of learned tokens, and masked responses."""
    advantages = experience.advantages
    learned = experience.loss_mask
    metrics.mean("rollout/advantage", advantages, learned)
    metrics.std("rollout/advantage_std", advantages, learned)
    metrics.min("rollout/advantage_min", advantages, learned)
    metrics.max("rollout/advantage_max", advantages, learned)
    metrics.mean("rollout/advantage_abs", advantages.abs(), learned)
    metrics.mean("rollout/left_out", (sequence_sums(learned.float(), experience) == 0).float())


# -- what only some runs need: branches of episodes, and outputs before the step


def with_branches(samples: list[Sample]) -> list[Sample]:
    """List each sample followed by the branches of the episode; they get the sample's reward."""
    for sample in samples:
        for branch in sample.rows[1:]:
            branch.reward = sample.reward
            branch.masked = sample.masked
            branch.finish_reason = sample.finish_reason
    return [row for sample in samples for row in sample.rows]


@dataclass(frozen=True, slots=True)
class PrecomputedOutputs:
    """Model outputs for the samples of a step that were complete before the others."""

    names: tuple[str, ...]
    """Columns of Experience, the same on all ranks."""
    parts: dict[int, tuple[Sample, list[Tensor]]]
    """id() of a sample -> the sample and the values of these columns, one for each token.

    The sample is kept alive, so no other object can get the same id."""

    def set_columns(self, experience: Experience, samples: list[Sample]) -> None:
        for place, name in enumerate(self.names):
            values = [self.parts[id(sample)][1][place] for sample in samples]
            setattr(experience, name, torch.cat([torch.zeros(0), *values]))
