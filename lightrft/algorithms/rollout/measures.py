"""Measures of samples that only runs with episodes or with drafts have."""

from functools import reduce

from lightrft.core.metrics import Metrics
from lightrft.core.samples import Drafts, Episode, Sample


def measure_turns_and_drafts(
    number: int, samples: list[Sample], version: int, metrics: Metrics
) -> None:
    """Measure the episodes and the drafts of this rank's samples, if they have any."""
    for sample in samples:
        if sample.episode is not None:
            _measure_episode(sample.episode, metrics)

    if drafts := [sample.drafts for sample in samples if sample.drafts.count]:
        _measure_drafts(reduce(Drafts.plus, drafts), metrics)


def _measure_drafts(drafts: Drafts, metrics: Metrics) -> None:
    # The two ratios have different denominators: drafted tokens, and rounds of drafting.
    if drafts.num_tokens:
        accepted = drafts.num_accepted
        metrics.mean("rollout/draft_acceptance", accepted / drafts.num_tokens, drafts.num_tokens)
        metrics.mean("rollout/draft_accepted_length", accepted / drafts.count, drafts.count)


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
    for role, reward in episode.role_rewards.items():
        metrics.mean(f"reward/{role}", reward)
        turns = sum(each.num_turns for each in conversations if each.role == role)
        metrics.mean(f"episodes/turns_of_{role}", float(turns))
    for name, count in episode.overridden.items():
        metrics.sum(f"agent/overridden_{name}", count)
