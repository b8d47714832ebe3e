"""Held-out evaluation: the score of the greedy response to every prompt, and pass@k over sampled responses."""

import torch

from lightrft.algorithms.advantage import RIGHT, share_of_draws
from lightrft.observe.metrics import Metrics
from lightrft.parallel.collectives import Axis
from lightrft.rewards.runner import RewardRunner
from lightrft.rollout.groups import Group


def evaluate(groups: list[Group], rewards: RewardRunner, metrics: Metrics, data: Axis) -> None:
    """Add `eval/*` metrics of all ranks' groups, which Sampler.answer() generated. The engine should be asleep.

    `eval/accuracy` is reported if all rewards, over all ranks, are 0 or 1: it is then the mean reward, which is a share.
    """
    responses = [sample for group in groups for sample in group.responses]
    for group in groups:
        rewards.begin(group.responses)
    rewards.finish(responses)
    rewards.count_failures("eval/reward_failures", metrics)
    right_or_wrong = all(data.gather(all(sample.reward in (0, 1) for sample in responses)))
    for group in groups:
        metrics.mean("eval/reward", group.greedy.reward)
        if right_or_wrong:
            metrics.mean("eval/accuracy", group.greedy.reward)
        metrics.mean("eval/response_length", len(group.greedy.token_ids))
        metrics.mean("eval/truncated", float(group.greedy.truncated))
        for k, share in pass_at_k(group).items():
            metrics.mean(f"eval/pass_at_{k}", share)
    metrics.sum("eval/num_samples", len(groups))


def pass_at_k(group: Group) -> dict[int, float]:
    """Return k -> share of draws of k of the n samples with a right one: 1 - C(wrong, k) / C(n, k); k is 1, 2, 4, ... n.

    The estimate is unbiased: Chen et al., arXiv 2107.03374, equation 1.
    """
    count, wrong = len(group.samples), sum(sample.reward <= RIGHT for sample in group.samples)
    powers = {2**power for power in range(count.bit_length())}
    wrong, whole = torch.tensor([float(wrong)]), torch.tensor([float(count)])
    return {k: 1 - float(share_of_draws(wrong, whole, k)) for k in sorted({*powers, count}) if 0 < k <= count}
