"""What some runs ask of groups: their state, what is kept of them, and how samples are shown.

After a step only the outcome of a group is kept.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor

from lightrft.core.groups import RIGHT, Group
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Drafts, Episode, Prompt, Sample
from lightrft.data.media_files import AUDIOS, IMAGES, VIDEOS
from lightrft.observe.sinks import BRANCHES, PROMPT_IDS, RESPONSE_IDS, SOUNDS, THUMBNAILS


def has_signal(group: Group) -> bool:
    """Return True if the samples differ in their rewards and not all of them are masked.

    Samples with rewards of several steps differ if one of these rewards does, even if the sums are
    equal.
    """
    rewards = {tuple(reward for _, reward in sample.steps) for sample in group.samples}
    return len(rewards) > 1 and not all(sample.masked for sample in group.samples)


def state_of(group: Group) -> dict[str, Any]:
    """Return the state of a group in plain types, without the prompt.

    Rewards are not part of it, because only complete groups get them.
    """
    responses = [
        (s.token_ids, s.logprobs, s.text, s.finish_reason, s.weight_versions)
        for s in group.responses
    ]
    return {
        "number": group.number,
        "row": group.row,
        "responses": responses,
        "greedy": bool(group.others),
        # Checkpoints hold tensors and plain types.
        "experts": [
            None if s.experts is None else torch.from_numpy(s.experts) for s in group.responses
        ],
    }


def group_of(state: dict[str, Any], prompts: Sequence[Prompt]) -> Group:
    """Return the group with this state."""
    others = int(state["greedy"])
    count = len(state["responses"]) - others
    row = state["row"]
    group = Group.begin(state["number"], row, prompts[row], count, others=others)

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
            has_signal(group),
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


def measure_turns_and_drafts(samples: list[Sample], metrics: Metrics) -> None:
    """Measure the episodes and the drafts of this rank's samples, if they have any."""
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
