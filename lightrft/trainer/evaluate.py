"""Held-out evaluation: the greedy response to every prompt, judged by the reward."""

from lightrft.observe.metrics import Metrics
from lightrft.rollout.rewards import Judge
from lightrft.rollout.sampler import Sampler
from lightrft.types import Prompt, Sample


def evaluate(sampler: Sampler, judge: Judge, prompts: list[Prompt], metrics: Metrics) -> list[Sample]:
    """Add `eval/*` metrics over all ranks' prompts; the engine must be awake. Returns this rank's samples."""
    samples = sampler.greedy(prompts)
    judge(samples)
    for sample in samples:
        metrics.mean("eval/accuracy", sample.reward)
        metrics.mean("eval/response_length", len(sample.token_ids))
        metrics.mean("eval/truncated", float(sample.truncated))
    metrics.sum("eval/num_samples", len(samples))
    return samples
