"""The way from rewards to the advantage of each token.

CompareRewards finds how much better each reward is than the others of its group. The stages follow:
first outputs of models, such as log-probs of the policy before the step, then advantages of tokens.
An option of the algorithm is one more stage.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from lightrft.core.batch import Batch
from lightrft.core.batches import Rows, TrainingPlan
from lightrft.core.estimators import Estimator, reward_to_go
from lightrft.core.groups import RewardColumn, RewardTable, data_column
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Sample
from lightrft.core.strategy import DataRanks
from lightrft.core.table import chosen, keywords


class CompareRewards:
    """Calls an estimator with the rewards of all ranks.

    A keyword-only parameter is an option, `lengths`, `responses`, or a number in the data's rows.
    """

    def __init__(self, estimator: Estimator, **options: Any):
        self.estimator = estimator
        self.options = chosen(estimator, options)
        self.asked = keywords(estimator)
        given = {*options, "lengths", "responses"}
        self.columns: dict[str, RewardColumn] = {
            name: partial(data_column, name)
            for name, needed in self.asked.items()
            if needed and name not in given
        }
        """Columns that the table of rewards has for the estimator."""

    def gather(self, data: DataRanks, samples: Sequence[Sample], *, first_row: int) -> RewardTable:
        """Return what the estimator reads, of all ranks; the first sample is row `first_row`."""
        return RewardTable.share(data, samples, first_row=first_row, more=self.columns)

    def __call__(self, table: RewardTable) -> Tensor:
        """Return the advantage of each reward: [M]."""
        rewards, named = self.inputs(table)
        named = {name: one for name, one in named.items() if name in self.asked}
        advantages = self.estimator(rewards, table["group"].long(), **self.options, **named)

        # Estimators may be the user's own, and a NaN would only show up as a broken model.
        if advantages.shape != rewards.shape or not advantages.isfinite().all():
            raise ValueError(
                f"the estimator {self.estimator.__name__} returns {advantages!r:.200}, but must"
                f" return a finite advantage for each of the {len(rewards)} rewards"
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
            experience.reward_advantages, experience, gamma=self.gamma
        )
