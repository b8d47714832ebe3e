"""Groups of responses to one prompt: as they grow, as they are compared, and as they are reported.

Every rank gets the rewards of all ranks, because estimators and reward shaping compare them. After
a step only the outcome of a group is kept.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor

from lightrft.algorithms.advantage import RIGHT, solved_share
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Drafts, Episode, Prompt, Sample
from lightrft.data.media_files import AUDIOS, IMAGES, VIDEOS
from lightrft.observe.sinks import BRANCHES, PROMPT_IDS, RESPONSE_IDS, SOUNDS, THUMBNAILS
from lightrft.parallel.collectives import Axis

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
    greedy: Sample | None = None
    """Greedy response to the same prompt, for estimators that compare with it. Nobody learns from
    it."""
    responses: list[Sample] = field(init=False)
    """All responses that are generated and scored."""
    places: range = field(init=False)
    """Places of all responses."""

    def __post_init__(self) -> None:
        self.responses = self.samples if self.greedy is None else [*self.samples, self.greedy]
        self.places = range(len(self.responses))

    @classmethod
    def begin(cls, number: int, row: int, prompt: Prompt, *, count: int, greedy: bool) -> Self:
        responses = [Sample(prompt, number, [], [], "", None) for _ in range(count + greedy)]
        return cls(number, row, responses[:count], responses[count] if greedy else None)

    @property
    def prompt(self) -> Prompt:
        return self.samples[0].prompt

    @property
    def complete(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.responses)

    def fits(self, longest: int) -> bool:
        """Return True if every response ends within `longest` tokens or still has room to grow."""
        return all(
            len(sample.token_ids) + (sample.finish_reason is None) <= longest
            for sample in self.responses
        )

    @property
    def has_signal(self) -> bool:
        """Return True if the samples differ in their rewards and not all of them are masked.

        Samples with rewards of several steps differ if one of these rewards does, even if the sums
        are equal.
        """
        rewards = {tuple(reward for _, reward in sample.steps) for sample in self.samples}
        return len(rewards) > 1 and not all(sample.masked for sample in self.samples)

    def mask(self) -> None:
        """Mask all samples, so that nothing is learned from them."""
        for sample in self.samples:
            sample.masked = True

    def compare_with_greedy(self) -> None:
        """Set the reward of the greedy response on the samples."""
        if self.greedy is not None:
            for sample in self.samples:
                sample.greedy_reward = self.greedy.reward

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types, without the prompt.

        Rewards are not part of it, because only complete groups get them.
        """
        responses = [
            (s.token_ids, s.logprobs, s.text, s.finish_reason, s.weight_versions)
            for s in self.responses
        ]
        return {
            "number": self.number,
            "row": self.row,
            "responses": responses,
            "greedy": self.greedy is not None,
            # Checkpoints hold tensors and plain types.
            "experts": [
                None if s.experts is None else torch.from_numpy(s.experts) for s in self.responses
            ],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], prompts: Sequence[Prompt]) -> Self:
        count = len(state["responses"]) - state["greedy"]
        group = cls.begin(
            state["number"],
            state["row"],
            prompts[state["row"]],
            count=count,
            greedy=state["greedy"],
        )

        for sample, values in zip(group.responses, state["responses"], strict=True):
            token_ids, logprobs, sample.text, finish_reason, versions = values
            sample.finish_reason = finish_reason
            # The lists grow in place, and the saved state must stay as it is.
            sample.token_ids = list(token_ids)
            sample.logprobs = list(logprobs)
            sample.weight_versions = list(versions)
        for sample, experts in zip(group.responses, state.get("experts", ()), strict=False):
            sample.experts = None if experts is None else experts.numpy()

        return group


# -- the rewards of all ranks


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
    columns: dict[str, Tensor] = field(default_factory=dict)
    """Numbers in the rows of the data, by column."""

    @classmethod
    def share(
        cls,
        axis: Axis,
        samples: list[Sample],
        *,
        first_row: int,
        components: bool = False,
        columns: Sequence[str] = (),
    ) -> Self:
        """Gather the rewards of all ranks; the first sample of this rank is row `first_row`.

        It takes one collective, or two if a rank has more rewards than ever before. The
        `components` take one more, for their names. Raises ValueError for a row of the data
        without a number in one of `columns`.
        """
        names: list[str] = []
        if components:
            mine = {name for sample in samples for name in _components(sample, sample.reward)}
            names = sorted(set().union(*axis.gather(mine)))

        lines = [
            line
            for row, sample in enumerate(samples, first_row)
            for line in _lines(row, sample, names, columns)
        ]
        named = [*names, *columns]
        width = len(fields(cls)) - 3 + len(named)
        table = torch.tensor(lines, dtype=torch.float64).reshape(-1, width)
        parts, _ = axis.gather_rows(table.view(torch.int64))  # the same bits
        first = sum(map(len, parts[: axis.rank]))
        values = torch.cat(parts).view(torch.float64).unbind(1)
        numbers = values[: width - len(named)]
        of_names = [*zip(named, values[width - len(named) :], strict=True)]
        local = slice(first, first + len(lines))
        return cls(*numbers, local, dict(of_names[: len(names)]), dict(of_names[len(names) :]))

    def totals(self) -> tuple[Tensor, Tensor]:
        """Return the total reward and the group of each response of all ranks: [N], [N]."""
        row = self.rows.unique(return_inverse=True)[1]
        count = int(row.max()) + 1 if len(row) else 0
        rewards = self.rewards.new_zeros(count).index_add(0, row, self.rewards)
        return rewards, self.groups.new_zeros(count).index_copy(0, row, self.groups)

    def solved_shares(self) -> Tensor:
        """Return, for each reward, the share of right responses in the group: [M]."""
        return solved_share(*self.totals())[self.rows.unique(return_inverse=True)[1]]


def _components(sample: Sample, reward: float) -> dict[str, float]:
    """Return the named parts of a reward, or the reward itself as its only part."""
    named = sample.reward_parts if sample.token_rewards is None else {}
    return named or {"reward": reward}


def _lines(
    row: int, sample: Sample, names: list[str], columns: Sequence[str]
) -> Iterator[tuple[float, ...]]:
    """Yield the numbers of each reward of a sample.

    They are the tensors of GatheredRewards in the order of the fields, and then the parts `names`
    and the `columns` of the data.
    """
    of_row = [number_in(sample.prompt, name) for name in columns]
    before = 0
    for place, (token, reward) in enumerate(sample.steps, 1):
        if place == len(sample.steps):
            length, greedy = (len(sample.token_ids), sample.greedy_reward)
        else:
            length, greedy = (0, 0.0)
        parts = _components(sample, reward) if names else {}
        of_names = [parts.get(name, 0.0) for name in names]
        yield row, sample.group, reward, token + 1 - before, length, greedy, *of_names, *of_row
        before = token + 1


def number_in(prompt: Prompt, column: str) -> float:
    """Return the number in a column of the row of a prompt.

    Raises ValueError, with the row, if there is none.
    """
    value = prompt.columns.get(column)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    row = prompt.location or f"row {prompt.index}"
    raise ValueError(
        f"--advantage_estimator asks for a number in the column {column!r}, and {row} has"
        f" {value!r:.50}; its columns: {', '.join(prompt.columns)}"
    )


def measure_groups(rewards: Tensor, groups: Tensor, metrics: Metrics) -> None:
    """Measure how many groups are solved to what degree, and how many have no signal.

    `rewards` [N] and `groups` [N] cover the responses of all ranks. Only totals are compared here;
    Group.has_signal also sees rewards of steps.
    """
    names, member, sizes = groups.unique(return_inverse=True, return_counts=True)
    zeros = rewards.new_zeros(len(names))
    best = zeros.scatter_reduce(0, member, rewards, "amax", include_self=False)
    worst = zeros.scatter_reduce(0, member, rewards, "amin", include_self=False)
    metrics.mean("rollout/groups_without_signal", (best == worst).float())
    solved = zeros.index_add(0, member, (rewards > RIGHT).to(rewards.dtype)) / sizes
    place = (4 * solved).ceil() + (solved == 1)
    for index, name in enumerate(SOLVED):
        metrics.mean(f"rollout/groups_solved_{name}", (place == index).float())


# -- what is kept of a group


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """Facts about a complete and scored group, known to every rank."""

    number: int
    row: int
    has_signal: bool
    solved: float
    """Share of right responses."""
    length: float
    """Mean number of tokens of a response."""

    @classmethod
    def of(cls, group: Group) -> Self:
        count = len(group.samples)
        solved = sum(sample.reward > RIGHT for sample in group.samples) / count
        return cls(
            group.number,
            group.row,
            group.has_signal,
            solved,
            sum(len(s.token_ids) for s in group.samples) / count,
        )


class History:
    """The last outcome of each prompt, the same on all ranks."""

    def __init__(self, num_prompts: int):
        self.epochs = torch.full((num_prompts,), -1)
        """Epoch when each prompt was last drawn, [prompts] int64; -1 if it never was."""
        self.solved = torch.zeros(num_prompts)
        self.lengths = torch.zeros(num_prompts)
        self._former: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """Row that changed since snapshot() -> the values before the change."""

    def snapshot(self) -> Callable[[], None]:
        """Return a function that undoes everything recorded between now and the next call.

        Only rows that change are copied.
        """
        former = self._former = {}

        def rollback() -> None:
            for row, (epoch, solved, length) in former.items():
                self.epochs[row] = epoch
                self.solved[row] = solved
                self.lengths[row] = length

        return rollback

    def record(self, outcomes: Iterable[GroupOutcome], epoch: int) -> None:
        columns = (self.epochs, self.solved, self.lengths)
        for outcome in outcomes:
            row = outcome.row
            if row not in self._former:
                self._former[row] = tuple(column[row].clone() for column in columns)
            self.epochs[row] = epoch
            self.solved[row] = outcome.solved
            self.lengths[row] = outcome.length

    def expected_lengths(self, rows: list[int]) -> list[float]:
        """Return how many tokens to expect of a response to each prompt: as many as last time.

        New prompts get the mean of the others, or 1.
        """
        generated = self.epochs >= 0
        mean = float(self.lengths[generated].mean()) if generated.any() else 1.0
        return [max(float(self.lengths[row]) if generated[row] else mean, 1.0) for row in rows]

    def state_dict(self) -> dict[str, Any]:
        # "turns" was the name of epochs when the format was made; old checkpoints still load.
        return {"turns": self.epochs, "solved": self.solved, "lengths": self.lengths}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs.copy_(state["turns"])
        self.solved.copy_(state["solved"])
        self.lengths.copy_(state["lengths"])


# -- samples, measured and shown


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
        for part, reward in sample.reward_parts.items():
            metrics.mean(f"rollout/reward_of_{part}", reward)

    metrics.mean("rollout/truncated", torch.tensor([float(sample.truncated) for sample in samples]))
    metrics.mean("rollout/staleness", staleness)
    metrics.max("rollout/staleness_max", staleness)
    metrics.mean("rollout/off_policy_tokens", staleness > 0)
    metrics.sum("rollout/tokens", sum(row.length for sample in samples for row in sample.rows))
    for sample in samples:
        if sample.episode is not None:
            _measure_episode(sample.episode, metrics)

    if drafts := [sample.drafts for sample in samples if sample.drafts.count]:
        _measure_drafts(reduce(Drafts.plus, drafts), metrics)


def _measure_drafts(drafts: Drafts, metrics: Metrics) -> None:
    # The two ratios have different denominators: drafted tokens, and rounds of drafting.
    if drafts.num_tokens:
        metrics.mean(
            "rollout/draft_acceptance", drafts.num_accepted / drafts.num_tokens, drafts.num_tokens
        )
        metrics.mean(
            "rollout/draft_accepted_length", drafts.num_accepted / drafts.count, drafts.count
        )


def _measure_episode(episode: Episode, metrics: Metrics) -> None:
    # A branch is a conversation of its own, but its tokens were sampled for the same episode.
    conversations = [episode, *(branch.episode for branch in episode.branches)]
    turns = sum(each.num_turns for each in conversations)
    sampled = sum(sum(each.sampled) for each in conversations)

    metrics.mean("episodes/turns", float(turns))
    metrics.max("episodes/turns_max", float(turns))
    metrics.mean("episodes/branches", float(len(episode.branches)))
    metrics.mean("episodes/tokens_sampled", float(sampled))
    metrics.mean(
        "episodes/tokens_observed",
        float(sum(len(each.sampled) for each in conversations) - sampled),
    )
    metrics.mean("episodes/tool_calls", float(episode.tool_calls))
    metrics.sum("episodes/tool_errors", episode.tool_errors)
    metrics.mean("episodes/tool_seconds", episode.tool_seconds)
    metrics.sum("episodes/failed", bool(episode.problem))
    metrics.sum("episodes/drift", episode.drift)


def sample_rows(samples: list[Sample]) -> list[dict[str, Any]]:
    """Return a row of samples.jsonl for each sample, for people and for programs.

    Thumbnails and sound of a prompt are in the first row of the group.
    """
    rows = []
    groups = set()
    for sample in samples:
        rows.append(_row(sample, first=sample.group not in groups))
        groups.add(sample.group)
    return rows


def _row(sample: Sample, *, first: bool) -> dict[str, Any]:
    prompt = sample.prompt
    media = prompt.multi_modal if first else {}
    pictures = [item.thumbnail() for medium in (IMAGES, VIDEOS) for item in media.get(medium, ())]
    sounds = [item.player() for item in media.get(AUDIOS, ())]

    return {
        "group": sample.group,
        "prompt": prompt.text,
        **{medium: [item.name for item in items] for medium, items in prompt.multi_modal.items()},
        "response": sample.text,
        "label": prompt.columns.get("label"),
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
        "length": len(sample.token_ids),
        PROMPT_IDS: list(prompt.token_ids),
        RESPONSE_IDS: sample.token_ids,
        **(_episode(sample.episode) if sample.episode else {}),
        **({THUMBNAILS: pictures} if pictures else {}),
        **({SOUNDS: sounds} if sounds else {}),
    }


def _episode(episode: Episode) -> dict[str, Any]:
    branches = [branch.episode.messages for branch in episode.branches]
    return {"messages": episode.messages, "problem": episode.problem} | (
        {BRANCHES: branches} if branches else {}
    )
