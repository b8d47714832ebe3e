"""Collect the samples of a step, measure them, and turn them into rows of samples.jsonl.

A scheduler chooses the prompts and the engine answers them. The reward function is called for a
group as soon as its last response has ended, and score() waits for the results.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any, Protocol

import torch

from lightrft.data.media_files import AUDIOS, IMAGES, VIDEOS
from lightrft.observe.metrics import Metrics
from lightrft.observe.sinks import BRANCHES, PROMPT_IDS, RESPONSE_IDS, SOUNDS, THUMBNAILS
from lightrft.rewards.runner import RewardRunner
from lightrft.rollout.groups import Group, GroupOutcome
from lightrft.types import Drafts, Episode, Sample


class Scheduler(Protocol):
    """Chooses a step's prompts and the groups to learn from, the same on all ranks.

    FixedBatch (fixed_batch.py) is the default; the others are in lightrft/schedulers.
    """

    def generate(self, step: int) -> Iterator[Group]:
        """Draw prompts and let the engine answer them, until the step has enough groups.

        Yield each of this rank's groups when the last response ends. All ranks generate together.
        """
        ...

    def selected(self, metrics: Metrics) -> list[Group]:
        """Return this rank's groups to learn from in this step, and measure how they were found.

        It is called once, after generate(), while the engine is still awake: with --max_staleness
        the responses of later steps begin here.
        """
        ...

    def finish_rewards(self, groups: list[Group]) -> list[GroupOutcome]:
        """Wait for the rewards of this rank's groups; return the outcomes of all ranks."""
        ...

    def preparing(self, step: int) -> AbstractContextManager[None]:
        """Prepare the first round of a step in another thread during the context."""
        ...

    def snapshot(self) -> Callable[[], None]:
        """Return a function that undoes whatever the scheduler does from now on."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Rollout:
    """Collects the samples of each step and scores them.

    A checkpoint holds the scheduler's state: the place in the data, the groups that have begun, and
    the last outcome of each prompt.
    """

    def __init__(self, scheduler: Scheduler, rewards: RewardRunner):
        self.scheduler = scheduler
        self.rewards = rewards

    def collect(self, step: int, metrics: Metrics) -> list[Group]:
        """Return this rank's complete groups of a step. The engine must be awake.

        All ranks together return `rollout_batch_size` groups. Raises ConfigError with
        --dynamic_sampling if no group of any round has a signal.
        """
        for group in self.scheduler.generate(step):
            # Rewards run in worker processes, so they cost no time while the engine decodes.
            self.rewards.begin(group.responses)
        return self.scheduler.selected(metrics)

    def score(self, groups: list[Group], metrics: Metrics) -> list[Sample]:
        """Wait for the rewards of groups, and return the samples."""
        self.scheduler.finish_rewards(groups)
        self.rewards.count_failures("rollout/reward_failures", metrics)
        return [sample for group in groups for sample in group.samples]

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


class JudgedRollout(Rollout):
    """A rollout whose responses a judge in the engine reads while the engine is awake."""

    def collect(self, step: int, metrics: Metrics) -> list[Group]:
        groups = super().collect(step, metrics)
        self.rewards.ask_judge([sample for group in groups for sample in group.responses])
        return groups


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
