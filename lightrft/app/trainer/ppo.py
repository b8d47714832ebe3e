"""PPO, GRPO and the like: generate samples, score them, estimate advantages, update."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass

from torch import nn

from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.rollout.rollout import FixedBatch
from lightrft.algorithms.rollout.sampler import RunSampler
from lightrft.app.observe.sinks import sample_rows
from lightrft.app.run.interruption import Interrupted
from lightrft.app.trainer.base import Trainer, TrainingData
from lightrft.config.sections import moves_reference
from lightrft.core.batch import TrainingPlan
from lightrft.core.groups import measure_samples
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Sample
from lightrft.core.step import Step, StepRecord
from lightrft.strategy.batching.micro_batches import put_batch

Read = Callable[[int], tuple[list[Sample], int]]
"""Returns the recorded samples of a step, and the version of the engine's weights then."""


@dataclass
class ReplayedStep(Step):
    """A step that learns from the samples that another run has recorded (--replay_rollouts)."""

    _: KW_ONLY
    read: Read

    def collect(self, number: int, metrics: Metrics) -> tuple[list[Sample], int]:
        return self.read(number)


@dataclass(eq=False, kw_only=True)
class PPOTrainer(Trainer):
    """Trains on generated samples: a step generates groups for a batch of prompts and learns."""

    learning_step: Step
    """Generates and learns. The trainer adds what a run needs around learning."""
    sampler: RunSampler
    answer: Callable[[nn.Module, int, Metrics], None]
    """Answers and scores the prompts of --eval_data after a step."""
    ends: Callable[[], bool] | None = None
    """Returns True if the step just done is the last one, on all ranks."""

    def __post_init__(self, training_data: TrainingData) -> None:
        super().__post_init__(training_data)
        self.policy: Policy = self.role
        self.rollout = self.learning_step.rollout
        self.replays = isinstance(self.learning_step, ReplayedStep)
        self.moves_reference = moves_reference(self.config.algorithm)
        self.has_readers = self.strategy.sample_store().is_outside

        self.learning_step.measures = [self._measure, *self.learning_step.measures]
        self.learning_step.around = self._around_learning
        if mixin := self.items.get("mixin"):
            self.learned_rows = self.prompts + mixin.prompts
        if self.moves_reference:
            self.models["reference"] = (self.policy.reference, None, None)

    def step(self, number: int) -> StepRecord:
        rollback = self.rollout.scheduler.snapshot()
        before = self.metrics.state_dict()
        version = self.strategy.weight_version
        try:
            return self.learning_step(number, self.metrics)
        except Interrupted:
            # A checkpoint holds only finished steps, so an interrupted one is undone: the same
            # prompts come again.
            rollback()
            self.metrics.clear()
            self.metrics.load_state_dict(before)
            self.strategy.engine_lags(version)
            raise

    def _measure(self, number: int, samples: list[Sample], version: int, metrics: Metrics) -> None:
        """Show and measure the samples of a step, unless the run was asked to stop."""
        if not self.replays:
            self.rollout.rewards.count_failures("rollout/reward_failures", metrics)
            self.interruption.safe_point()
        # Samples of a group come together, so that responses can be compared.
        if self.strategy.mesh.world.rank == 0:
            shown = samples[: self.config.observe.num_trajectories_to_save]
            self.observer.samples(number, sample_rows(shown))
        measure_samples(samples, version, metrics)

    @contextmanager
    def _around_learning(self, number: int, plan: TrainingPlan) -> Iterator[None]:
        """Let others read the experience, and prepare the next step, while models learn."""
        # Other programs read the experience in a store outside of this one.
        store = self.strategy.sample_store() if self.has_readers else None
        if store is not None:
            put_batch(store, plan.experience)

        # Which prompts come next depends on the rewards of this step, and not on its updates.
        scheduler = self.rollout.scheduler
        continues = not self.replays and number < self.total_steps
        prepares = continues and isinstance(scheduler, FixedBatch)
        with scheduler.preparing(number + 1) if prepares else nullcontext():
            yield

        if self.moves_reference:
            self.policy.update_reference(number, self.config.algorithm)
        if store is not None:
            store.clear(plan.experience.rows.tolist())

    def enough(self) -> bool:
        return self.ends is not None and self.ends()

    def progress(self) -> str:
        """Add how many responses this rank has, and how many tokens a second."""
        where = super().progress()
        loop = self.sampler.loop
        if loop is None or not self.trace.current.startswith("generate"):
            return where

        responses = [each for group in list(loop.groups.values()) for each in group.responses]
        done = sum(each.finish_reason is not None for each in responses)
        tokens = sum(len(each.token_ids) for each in responses)
        seconds = time.perf_counter() - self.trace.began
        rank = " of rank 0" if self.strategy.mesh.world.size > 1 else ""
        speed = f"{tokens / seconds:.0f} tokens/s"
        return f"{where}, {done:,} of {len(responses):,} responses{rank}, {speed}"

    def evaluate(self) -> None:
        self.answer(self.policy.actor, self.done, self.metrics)
