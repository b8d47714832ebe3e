"""Collect the samples of a step.

A scheduler chooses the prompts and the engine answers them. The reward function is called for a
group as soon as its last response has ended, and score() waits for the results.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lightrft.observe.metrics import Metrics
from lightrft.rewards.runner import RewardRunner
from lightrft.rollout.groups import Group, GroupOutcome
from lightrft.types import Sample


class Round(Protocol):
    """Groups that all ranks generate together."""

    def generate(self) -> Iterator[Group]:
        """Let the engine decode; yield each of this rank's groups when the last response ends."""
        ...

    def groups(self) -> list[Group]:
        """Return this rank's groups at the end of the round."""
        ...


class Scheduler(Protocol):
    """Chooses a step's prompts and the groups to learn from, the same on all ranks.

    FixedBatch (fixed_batch.py) is the default; the others are in lightrft/schedulers.
    """

    def begin_step(self, step: int) -> None: ...

    def next_round(self) -> Round | None:
        """Draw prompts and begin the responses; return None if the step is complete."""
        ...

    def on_finished(self, groups: list[Group]) -> None:
        """Take this rank's groups when a round has ended."""
        ...

    def selected(self) -> list[Group]:
        """Return this rank's groups to learn from in this step.

        It is called once, at the end of the step's rounds, while the engine is still awake: with
        --max_staleness the responses of later steps begin here.
        """
        ...

    def finish_rewards(self, groups: list[Group]) -> list[GroupOutcome]:
        """Wait for the rewards of this rank's groups; return the outcomes of all ranks."""
        ...

    def report(self, metrics: Metrics) -> None:
        """Add the numbers of the step to the metrics, once the last round has ended."""
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
        self.scheduler.begin_step(step)

        while (round := self.scheduler.next_round()) is not None:
            for group in round.generate():
                # Rewards run in worker processes, so they cost no time while the engine decodes.
                self.rewards.begin(group.responses)
            self.scheduler.on_finished(round.groups())

        self.scheduler.report(metrics)
        return self.scheduler.selected()

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
