"""PPO, GRPO and the like: generate samples, score them, estimate advantages, update."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from lightrft.batching.micro_batches import put_batch
from lightrft.config.sections import Config, moves_reference
from lightrft.core.experience import ExperienceMaker
from lightrft.core.groups import measure_samples
from lightrft.core.role import Learner
from lightrft.core.samples import Sample
from lightrft.data.prompt_set import PromptSet
from lightrft.engine.requests import derived_seed
from lightrft.roles.policy import Policy
from lightrft.roles.role import DistributedRole
from lightrft.rollout.groups import measure_turns_and_drafts, sample_rows
from lightrft.rollout.rollout import Rollout
from lightrft.rollout.sampler import Sampler
from lightrft.run.digests import StepRecord
from lightrft.run.interruption import Interrupted
from lightrft.strategy.strategy import StrategyBase
from lightrft.trainer.base import Trainer, TrainingData
from lightrft.trainer.held_out import HeldOut, ask_judges, evaluate

SampleSink = Callable[[int, list[Sample], int], None]
"""Takes a step's number, the samples, and the version of the engine's newest weights."""


class PPOTrainer(Trainer):
    """Trains on generated samples: a step generates groups for a batch of prompts and learns."""

    def __init__(
        self,
        config: Config,
        strategy: StrategyBase,
        policy: Policy,
        training_data: TrainingData,
        *,
        rollout: Rollout,
        sampler: Sampler,
        make_experience: ExperienceMaker,
        learners: Sequence[Learner],
        eval_sets: Sequence[HeldOut] = (),
        dump: SampleSink | None = None,
        **kwargs,
    ):
        """Set up the trainer.

        `learners` are the models that learn, in order; the policy is the last one. `dump` records
        the samples of each step.
        """
        super().__init__(config, strategy, policy, training_data, **kwargs)
        self.policy = policy
        self.rollout = rollout
        self.sampler = sampler
        self.make_experience = make_experience
        self.learners = learners
        self.eval_sets = eval_sets
        self.sample_sinks: list[SampleSink] = [] if dump is None else [dump]
        self.moves_reference = moves_reference(config.algorithm)
        self.has_readers = strategy.sample_store().is_outside

        for each in learners:
            self.models[each.name] = (each.role.module, each.role.optimizer, each.role.scheduler)
        if self.moves_reference:
            self.models["reference"] = (policy.reference, None, None)

    def step(self, number: int) -> StepRecord:
        samples, version = self._collect(number)
        for sink in self.sample_sinks:
            sink(number, samples, version)
        self.show(number, samples)
        measure_samples(samples, version, self.metrics)
        measure_turns_and_drafts(samples, self.metrics)

        with self.trace.phase("experience"):
            plan = self.make_experience(samples, self.metrics)
        # Other programs read the experience in a store outside of this one.
        store = self.strategy.sample_store() if self.has_readers else None
        if store is not None:
            put_batch(store, plan.experience)

        losses = []
        # Which prompts come next depends on the rewards of this step, and not on its updates.
        with self._preparing(number + 1):
            for learner in self.learners:
                if number >= learner.first_step:
                    with self.trace.phase(learner.phase):
                        losses += learner.learn(plan, self.metrics)

        if self.moves_reference:
            self.policy.update_reference(number, self.config.algorithm)

        if store is not None:
            store.clear(plan.experience.rows.tolist())
        return StepRecord(plan.experience, plan.minibatches, losses, samples)

    def progress(self) -> str:
        """Add how many responses this rank has, and how many tokens a second."""
        where = super().progress()
        if not self.trace.current.startswith("generate"):
            return where

        groups = list(self.sampler.generating.values())
        responses = [each for group in groups for each in group.responses]
        done = sum(each.finish_reason is not None for each in responses)
        tokens = sum(len(each.token_ids) for each in responses)
        seconds = time.perf_counter() - self.trace.began
        rank = " of rank 0" if self.strategy.mesh.world.size > 1 else ""
        speed = f"{tokens / seconds:.0f} tokens/s"
        return f"{where}, {done:,} of {len(responses):,} responses{rank}, {speed}"

    def _collect(self, number: int) -> tuple[list[Sample], int]:
        """Generate and score this rank's samples; return them and the engine's weight version."""
        rollback = self.rollout.scheduler.snapshot()
        metrics = self.metrics.state_dict()
        weight_version = self.strategy.weight_version

        with self.trace.phase("generate"), self.strategy.engine_awake(self.policy.actor):
            groups = self.rollout.collect(number, self.metrics)

        with self.trace.phase("reward"):
            samples = self.rollout.score(groups, self.metrics)

        # A checkpoint holds only finished steps, so an interrupted one is undone: the same prompts
        # come again.
        try:
            self.interruption.safe_point()
        except Interrupted:
            rollback()
            self.metrics.clear()
            self.metrics.load_state_dict(metrics)
            self.strategy.engine_lags(weight_version)
            raise

        return samples, self.strategy.weight_version

    def _preparing(self, number: int) -> AbstractContextManager[None]:
        """Return a context that prepares a step in another thread, if there is one."""
        if number > self.total_steps:
            return nullcontext()
        return self.rollout.scheduler.preparing(number)

    def show(self, number: int, samples: list[Sample]) -> None:
        """Write some samples to the sinks, by group, so that responses can be compared."""
        if self.strategy.mesh.world.rank == 0:
            self.observer.samples(
                number, sample_rows(samples[: self.config.observe.num_trajectories_to_save])
            )

    def evaluate(self) -> None:
        """Add `eval/*` metrics of --eval_data.

        The engine's weights keep their version: versions count steps, and the next step streams
        these same weights under the same version.
        """
        version = self.strategy.weight_version
        with self.strategy.engine_awake(self.policy.actor):
            seed = self.config.train.seed
            answered = [
                self.sampler.answer(
                    each.prompts, seed=derived_seed(seed, "evaluation", self.done, *each.seed_parts)
                )
                for each in self.eval_sets
            ]
            ask_judges(self.eval_sets, answered)

        self.strategy.engine_lags(version)
        # Scoring comes after generation, because reward models may need the device.
        for each, groups in zip(self.eval_sets, answered, strict=True):
            evaluate(each, groups, self.metrics, self.strategy.mesh.data)

    @property
    def learning_roles(self) -> dict[str, DistributedRole]:
        return {each.name: each.role for each in self.learners}

    def models_to_save(self) -> dict[str, nn.Module]:
        others = {each.name: each.role.module for each in self.learners[:-1]}
        return super().models_to_save() | others

    @property
    def learned_rows(self) -> PromptSet:
        mixin = self.parts.get("mixin")
        return self.prompts if mixin is None else self.prompts + mixin.prompts


class ReplayTrainer(PPOTrainer):
    """Learns from the samples that another run has recorded (--replay_rollouts)."""

    def __init__(self, *args: Any, read: Callable[[int], tuple[list[Sample], int]], **kwargs):
        super().__init__(*args, **kwargs)
        self.read = read

    def _collect(self, number: int) -> tuple[list[Sample], int]:
        return self.read(number)

    def _preparing(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()
