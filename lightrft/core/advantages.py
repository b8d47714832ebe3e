"""The way from rewards to the advantage of each token.

An estimator says how much better a reward is than the rewards it is compared with. It takes the
rewards and groups of **all** samples of a step, of all ranks, and returns one advantage per reward:
[M], [M] -> [M]. A sample has one reward for the whole response, or several, each for a step of it
(process supervision). The keyword-only parameters of an estimator are options of the run, or
columns of the rewards: `lengths` [M], the tokens that the reward is for; `responses` [M], the index
of the response, whose rewards are adjacent; or, for any other parameter without a default, the
number in this column of the data's rows.

CompareRewards calls it. The stages follow: first outputs of models, such as log-probs of the policy
before the step, then advantages of tokens. An option of the algorithm is one more stage.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lightrft.core.batch import Batch, Rows, TrainingPlan, padded, unpadded
from lightrft.core.groups import REWARD_COLUMNS, RewardColumn, RewardTable, data_column
from lightrft.core.losses import sequence_sums
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Sample
from lightrft.core.strategy import DataRanks
from lightrft.core.table import checked_options, keywords, label

Estimator = Callable[..., Tensor]


def reinforce(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = R_i: no baseline. Williams, Machine Learning 8, 1992."""
    return rewards


def grpo(rewards: Tensor, groups: Tensor, *, eps: float = 1e-4) -> Tensor:
    """A_i = (R_i - mean_g R) / (std_g R + eps), std with Bessel's correction.

    A group of equal rewards, or of one, has advantage 0. DeepSeekMath, arXiv 2402.03300, sections
    4.1.2 (one reward) and 4.1.3 (one per step).
    """
    mean, std = group_mean_std(rewards, groups)
    return (rewards - mean) / (std + eps)


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = R_i - mean_g R.

    Dr. GRPO, arXiv 2503.20783: dividing by std_g favours prompts that are easy or hard.
    """
    return rewards - group_mean_std(rewards, groups)[0]


def rloo(rewards: Tensor, groups: Tensor, *, responses: Tensor) -> Tensor:
    """A_i = R_i - mean of the other R_j of the group; 0 where there are none.

    Ahmadian et al., arXiv 2402.14740. The baseline of a response with several rewards excludes all
    of them. In the baselines of the others its R_j is the mean of its rewards: PRIME, arXiv
    2502.01456, equation 5.
    """
    mean, _ = group_mean_std(rewards, responses)
    first = torch.ones_like(mean)
    first[1:] = (responses[1:] != responses[:-1]).double()
    total = group_sum(first * mean, groups)
    size = group_sum(first, groups)
    return torch.where(size > 1, rewards - (total - mean) / (size - 1).clamp(min=1), 0.0)


def group_mean_std(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and unbiased standard deviation of the group that each value belongs to.

    [N], [N] -> [N], [N] float64. In float32 the mean of equal values need not be that value, and
    the difference would look like a signal.
    """
    values = values.double()
    size = group_sum(torch.ones_like(values), groups)
    mean = group_sum(values, groups) / size
    squares = group_sum((values - mean).square(), groups)
    return mean, (squares / (size - 1).clamp(min=1)).sqrt()


def group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """Return the sum over each value's group, for each value. [N], [N] -> [N]."""
    names, member = torch.unique(groups, return_inverse=True)
    return values.new_zeros(len(names)).index_add(0, member, values)[member]


# -- over tokens
#
# Time steps are learned tokens only: text of a tool or an environment between them is skipped.
# Values of tokens are [T], computed in float64, and 0 for tokens that are not learned.


def reward_to_go(rewards: Tensor, batch: Batch, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1}. [T] -> [T]."""
    return from_rows(discounted_sums(to_rows(rewards, batch), gamma), batch)


def discounted_sums(rows: Tensor, factor: float) -> Tensor:
    """y_t = x_t + factor y_{t+1} along each row: [N, L] -> [N, L].

    After k rounds each entry is the sum of the 2^k entries that start with it.
    """
    sums = rows.clone()
    reach = 1
    while reach < rows.shape[1]:
        sums[:, :-reach] = sums[:, :-reach] + factor**reach * sums[:, reach:]
        reach *= 2
    return sums


def to_rows(values: Tensor, batch: Batch) -> Tensor:
    """Return the learned tokens of each sequence as a row, padded with 0: [T] -> [N, L] float64."""
    lengths = sequence_sums(batch.loss_mask.long(), batch)
    return padded(values.double()[batch.learned_tokens], lengths, max(lengths.tolist(), default=0))


def from_rows(rows: Tensor, batch: Batch) -> Tensor:
    """Invert to_rows(): [N, L] -> [T]."""
    values = rows.new_zeros(batch.num_tokens)
    values[batch.learned_tokens] = unpadded(rows, sequence_sums(batch.loss_mask.long(), batch))
    return values


# -- stages


class CompareRewards:
    """Calls an estimator with the rewards of all ranks.

    A keyword-only parameter is an option, `lengths`, `responses`, or without a default a number in
    the data's rows.
    """

    def __init__(self, estimator: Estimator, **options: Any):
        """Set up the call. Raises ValueError for an option that the estimator does not name, and
        for a column of the data whose name the table of rewards has for another.
        """
        self.estimator = estimator
        self.options = checked_options(estimator, options)
        self.asked = keywords(estimator)
        given = {*options, "lengths", "responses"}
        self.columns: dict[str, RewardColumn] = {
            name: partial(data_column, name)
            for name, needed in self.asked.items()
            if needed and name not in given
        }
        """Columns that the table of rewards has for the estimator."""
        if taken := [name for name in REWARD_COLUMNS if name in self.columns]:
            raise ValueError(
                f"{label(estimator)} asks for the column {taken[0]!r} of the data, and the table of rewards"
                " has another one of this name: rename the parameter and the column"
            )

    def gather(self, data: DataRanks, samples: Sequence[Sample], *, first_row: int) -> RewardTable:
        """Return what the estimator reads, of all ranks; the first sample is row `first_row`."""
        return RewardTable.share(data, samples, first_row=first_row, further=self.columns)

    def __call__(self, table: RewardTable) -> Tensor:
        """Return the advantage of each reward: [M]."""
        rewards, named = self.inputs(table)
        named = {name: one for name, one in named.items() if name in self.asked}
        advantages = self.estimator(rewards, table["group"].long(), **self.options, **named)

        # Estimators may be the user's own, and a NaN would only show up as a broken model.
        shape = advantages.shape if isinstance(advantages, Tensor) else None
        if shape != rewards.shape or not advantages.isfinite().all():
            raise ValueError(
                f"the estimator {label(self.estimator)} returns {advantages!r:.200}, but must return"
                f" a finite advantage for each of the {len(rewards)} rewards: {rewards!r:.200}"
            )
        return advantages

    def inputs(self, table: RewardTable) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rewards to compare, [M] float32, and what an estimator may name."""
        named = {name: table[name].float() for name in self.columns}
        named |= {"lengths": table["length"], "responses": table["row"]}
        return table["reward"].float(), named


class Stage(ABC):
    """Sets columns of an experience."""

    reads: Sequence[str] = ()
    """Columns that the stage needs."""
    writes: Sequence[str] = ()
    """Columns that the stage sets or changes."""
    depends_on_samples_alone = False
    """True if the stage can run before all samples of a step are complete."""

    @abstractmethod
    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        """Set the columns of the plan's experience. All ranks call it."""


class LogprobModel(Protocol):
    """A model that returns log p of every learned token of a batch, 0 elsewhere.

    They are [T] float32 on the host. All ranks call it together.
    """

    def logprobs(self, batch: Batch, rows: Rows) -> Tensor: ...


class PolicyLogprobs(Stage):
    """Computes the policy's log-probs before the update.

    With a single update they equal the log-probs of the update itself. They are computed then only
    if they are `needed` by another stage. An experience that already has them is left as it is.
    """

    writes = ("old_logprobs",)
    depends_on_samples_alone = True

    def __init__(self, policy: LogprobModel, *, needed: bool = False):
        self.policy = policy
        self.needed = needed

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        experience = plan.experience
        if experience.old_logprobs is None and (self.needed or len(plan.updates) > 1):
            experience.old_logprobs = self.policy.logprobs(experience, plan.microbatches)


class RewardToGo(Stage):
    """Sums the advantages of the rewards from each token on, discounted by gamma."""

    reads = ("reward_advantages",)
    writes = ("advantages",)

    def __init__(self, gamma: float = 1.0):
        self.gamma = gamma

    def __call__(self, plan: TrainingPlan, metrics: Metrics) -> None:
        experience = plan.experience
        experience.advantages = reward_to_go(
            cast(Tensor, experience.reward_advantages), experience, gamma=self.gamma
        )
