"""What only some runs ask of the experience: columns, branches of episodes, and early outputs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrft.core.batch import Experience, RoutedShape
from lightrft.core.batches import TrainingPlan
from lightrft.core.experience import ExperienceMaker, LocalSamples, at_learned_tokens, flatten
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Expand, Expanded, Sample
from lightrft.core.stages import Stage
from lightrft.strategy.strategy import StrategyBase

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
    expanded = _expand_prompts(samples, expand) if expand else None
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


def _expand_prompts(samples: list[Sample], expand: Expand) -> list[Expanded]:
    """Expand each sample's prompt once for the whole group."""
    prompts = {sample.group: sample.prompt for sample in samples}
    read = {group: expand(prompt) for group, prompt in prompts.items()}
    return [read[sample.group] for sample in samples]


# -- branches


def with_branches(samples: list[Sample]) -> list[Sample]:
    """List each sample followed by the branches of the episode; they get the sample's reward."""
    for sample in samples:
        for branch in sample.rows[1:]:
            branch.reward = sample.reward
            branch.masked = sample.masked
            branch.finish_reason = sample.finish_reason
    return [row for sample in samples for row in sample.rows]


class BranchExperience(ExperienceMaker):
    """Learns from the branches of episodes too, in the optimizer step of their sample."""

    def __call__(self, samples: list[Sample], metrics: Metrics) -> TrainingPlan:
        data = self.strategy.data
        rows = with_branches(samples)
        facts = [(sample.group, len(sample.rows)) for sample in samples]
        parts = data.gather(facts)
        first = sum(map(len, parts[: data.rank]))
        experience = self.flatten(rows)
        experience.rows, units = numbers_of_branches(parts, data.rank)

        table = self.compare.gather(data, samples, first_row=first)
        counts = torch.tensor([count for _, count in facts], dtype=torch.int64)
        numbers = first + torch.repeat_interleave(counts)
        local = LocalSamples(experience, rows, table, numbers, data)
        advantages = self.advantages(local, metrics)
        experience.reward_advantages = place_at_branches(advantages, samples, experience)
        return self.planned(experience, metrics, units)


def numbers_of_branches(
    parts: Sequence[Sequence[tuple[int, int]]], rank: int
) -> tuple[Tensor, Tensor]:
    """Return the numbers of a rank's rows, and of the samples that they belong to: [N], [N] int64.

    `parts` has (group, number of rows) of the samples of all ranks. Numbers count over all ranks in
    the order of groups; see numbers_of_rows().
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


def place_at_branches(values: Tensor, samples: list[Sample], experience: Experience) -> Tensor:
    """Put the values [M] of this rank's rewards at the tokens that earned them: [T] float32.

    The experience has a row for each sample and for each branch of the sample. A branch gets the
    sum of the sample's values at the branch's last token.
    """
    numbers = iter(values.tolist())
    ends = iter(experience.offsets.tolist()[1:])
    places: list[int] = []
    sums: list[float] = []

    for sample in samples:
        start = next(ends) - len(sample.token_ids)
        places += [start + token if token >= 0 else -1 for token, _ in sample.steps]
        of_sample = [next(numbers) for _ in sample.steps]
        branches = [next(ends) - 1 for _ in sample.rows[1:]]
        places += branches
        sums += of_sample + [sum(of_sample)] * len(branches)

    return at_learned_tokens(torch.tensor(sums), places, experience)


# -- before the step (--overlap)


class EarlyOutputs:
    """Flattens samples, with outputs of models that were computed while others were generated."""

    def __init__(
        self,
        strategy: StrategyBase,
        flatten: Callable[..., Experience],
        stages: Sequence[Stage],
        *,
        num_updates: int,
        limits: Mapping[str, Any],
    ):
        """Set up the outputs of those `stages` that need no other samples.

        `num_updates`: how many optimizer steps use the samples of a step. `limits` are of
        micro-batches.
        """
        self.strategy = strategy
        self.flatten = flatten
        self.stages = [each for each in stages if each.depends_on_samples_alone]
        self.num_updates = num_updates
        self.limits = limits
        self._names: list[str] = []
        """Columns of Experience that were computed, the same on all ranks."""
        self._known: dict[int, tuple[Sample, list[Tensor]]] | None = None
        """id() of a row -> the row and the values of these columns, one for each token.

        The row is kept alive, so no other object can get the same id. None until compute() was
        called in a step."""

    def compute(self, samples: list[Sample]) -> None:
        """Run the stages for some samples that are complete.

        All ranks call it together, each with samples of its own or none. Until the step ends, the
        calls must come from one thread or one after another.
        """
        self._compute(with_branches(samples))

    def __call__(self, rows: list[Sample]) -> Experience:
        """Return the experience of all rows of the step."""
        experience = self.flatten(rows)
        if self._known is not None:
            # Samples that were complete too late for the overlap are computed now, by all ranks.
            self._compute([row for row in rows if id(row) not in self._known])
            for place, name in enumerate(self._names):
                values = [self._known[id(row)][1][place] for row in rows]
                setattr(experience, name, torch.cat([torch.zeros(0), *values]))
            self._known = None
        return experience

    def _compute(self, rows: list[Sample]) -> None:
        data = self.strategy.data
        counts = data.gather(len(rows))
        ends = list(accumulate(counts))
        owners = [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
        flattened = self.flatten(rows, first_row=ends[data.rank] - len(rows))

        store = self.strategy.sample_store()
        part, minibatches = self.strategy.redistribute(
            flattened, minibatch_size=None, store=store, **self.limits
        )
        plan = TrainingPlan(part, minibatches or [[]], self.num_updates)
        for stage in self.stages:
            stage(plan, Metrics())

        # The outputs go back to the ranks that have the samples.
        names = dict.fromkeys(name for stage in self.stages for name in stage.writes)
        outputs = {name: value for name in names if (value := getattr(part, name)) is not None}
        store.put(part.rows, part.lengths, tokens=outputs)
        store.move(owners, list(outputs))
        columns = store.get(flattened.rows, list(outputs))
        store.clear(flattened.rows.tolist())

        if self._known is None:
            self._known = {}
            self._names = list(outputs)
        parts = [columns[name].split(flattened.lengths.tolist()) for name in outputs]
        self._known |= {id(row): (row, values) for row, *values in zip(rows, *parts, strict=True)}
