"""Measure samples, groups, and the experience made of them."""

from functools import reduce

import torch
from torch import Tensor

from lightrft.algorithms.advantage import RIGHT, explained_variance
from lightrft.algorithms.reduce import Sum, sequence_sums
from lightrft.observe.metrics import Metrics
from lightrft.types import Drafts, Episode, Experience, Sample

SOLVED = ("0", "to_25", "to_50", "to_75", "below_100", "100")
"""Names of the buckets of a group's share of right samples: 0, up to 25 %, up to 50 %, up to 75 %,
below 100 %, and 100 %."""


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


def measure_values(experience: Experience, total: Sum, metrics: Metrics) -> None:
    """Measure the critic's values before the step, and how well they explain all ranks' returns."""
    learned = experience.loss_mask
    metrics.mean("critic/return", experience.returns, learned)
    explained = explained_variance(experience.values, experience.returns, learned, total)
    metrics.mean("critic/explained_variance", explained, explained.isfinite())
