"""From scored samples to experience: advantages, the plan of who computes what, and log-probs before the step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.algorithms.advantage import estimators
from lightrft.config import AlgorithmSection, TrainSection
from lightrft.data.plane import deal, share
from lightrft.observe.metrics import Metrics
from lightrft.roles.policy import Policy
from lightrft.types import Experience, Sample

Estimator = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Planned:
    """This rank's part of the experience, and its micro-batches for each optimizer step: minibatches[k][m] are rows."""

    experience: Experience
    minibatches: list[list[list[int]]]


class ExperienceMaker:
    """Turns this rank's samples into the experience that this rank will train on, balanced over ranks."""

    def __init__(self, policy: Policy, algorithm: AlgorithmSection, train: TrainSection):
        self.policy = policy
        self.estimator: Estimator = estimators[algorithm.advantage_estimator]
        self.train = train
        self.data = policy.strategy.mesh.data

    def __call__(self, samples: list[Sample], metrics: Metrics) -> Planned:
        experience = flatten(samples, first_row=sum(self.data.gather(len(samples))[: self.data.rank]))
        self._set_advantages(experience, metrics)
        experience, minibatches = deal(
            self.data,
            experience,
            minibatch_size=self.train.train_batch_size,
            max_tokens=self.train.max_tokens_per_microbatch,
            max_sequences=self.train.micro_train_batch_size,
            batching=self.train.batching,
        )
        self._set_logprobs(experience, minibatches)
        return Planned(experience, minibatches)

    def _set_advantages(self, experience: Experience, metrics: Metrics) -> None:
        """Advantages from the rewards and groups of all ranks, so that no statistic is a rank's own."""
        rewards, groups = share(self.data, experience.rewards), share(self.data, experience.groups)
        advantages = self.estimator(rewards, groups)[experience.rows]
        experience.advantages = torch.where(experience.loss_mask, advantages[experience.sequence_ids], 0.0)
        metrics.mean("rollout/advantage_abs", advantages.abs())
        if self.data.rank == 0:
            self._report_groups(rewards, groups, metrics)

    def _report_groups(self, rewards: Tensor, groups: Tensor, metrics: Metrics) -> None:
        """Share of groups that teach nothing because all their rewards are equal."""
        names, member = groups.unique(return_inverse=True)
        nothing = rewards.new_zeros(len(names))
        best = nothing.scatter_reduce(0, member, rewards, "amax", include_self=False)
        worst = nothing.scatter_reduce(0, member, rewards, "amin", include_self=False)
        metrics.mean("rollout/groups_without_signal", (best == worst).float())

    def _set_logprobs(self, experience: Experience, minibatches: list[list[list[int]]]) -> None:
        """Old and reference log-probs. With a single update the old ones are the update's own, so nothing is computed."""
        rows = [members for minibatch in minibatches for members in minibatch]
        if len(minibatches) * self.train.max_epochs > 1:
            experience.old_logprobs = self.policy.logprobs(experience, rows)
        if self.policy.reference is not None:
            experience.reference_logprobs = self.policy.reference_logprobs(experience, rows)


def flatten(samples: list[Sample], *, first_row: int) -> Experience:
    """Samples end to end, prompt and response; the response is learned. Rows count on from `first_row`."""
    prompts = [len(sample.prompt.token_ids) for sample in samples]
    responses = [len(sample.token_ids) for sample in samples]
    parts = torch.tensor([length for pair in zip(prompts, responses, strict=True) for length in pair], dtype=torch.int64)
    learned = torch.tensor([False, True]).repeat(len(samples))
    tokens = [token for sample in samples for token in (*sample.prompt.token_ids, *sample.token_ids)]
    logprobs = [value for sample in samples for value in (*[0.0] * len(sample.prompt.token_ids), *sample.logprobs)]
    return Experience(
        lengths=torch.tensor([sample.length for sample in samples], dtype=torch.int64),
        input_ids=torch.tensor(tokens, dtype=torch.int64),
        loss_mask=torch.repeat_interleave(learned, parts),
        rows=torch.arange(first_row, first_row + len(samples)),
        groups=torch.tensor([sample.group for sample in samples], dtype=torch.int64),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        engine_logprobs=torch.tensor(logprobs, dtype=torch.float32),
    )
