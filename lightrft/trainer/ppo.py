"""PPO, GRPO and the like: generate samples, score them, estimate advantages, update."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightrft.config.sections import Config, moves_reference
from lightrft.core.engine import derived_seed
from lightrft.core.metrics import Metrics
from lightrft.core.rollout import Rollout
from lightrft.core.samples import Sample
from lightrft.core.step import Step, StepRecord
from lightrft.data.prompt_set import PromptSet
from lightrft.roles.policy import Policy
from lightrft.roles.role import Objective, Role
from lightrft.rollout.experience import ExperienceMaker
from lightrft.rollout.groups import measure_samples, sample_rows
from lightrft.rollout.plan import TrainingPlan
from lightrft.rollout.rollout import FixedBatch
from lightrft.rollout.sampler import RunSampler
from lightrft.run.interruption import Interrupted, Interruption
from lightrft.strategy.strategy import StrategyBase
from lightrft.trainer.base import Trainer, TrainingData
from lightrft.trainer.held_out import HeldOut, ask_judges, evaluate
from lightrft.trainer.tasks.sft import PtxLoss

SampleSink = Callable[[int, list[Sample], int], None]
"""Takes a step's number, the samples, and the version of the engine's newest weights."""
Read = Callable[[int], tuple[list[Sample], int]]
"""Returns the recorded samples of a step, and the version of the engine's weights then."""


@dataclass(frozen=True, slots=True)
class Learner:
    """A role and the objective that it minimizes.

    The targets of one role do not depend on the updates of another.
    """

    name: str
    """Name of the model in checkpoints."""
    role: Role
    objective: Objective
    phase: str
    """Name of the phase, and prefix of the metrics."""
    config: Config
    first_step: int = 1
    """First step in which the role learns."""
    ptx_loss: PtxLoss | None = None
    """Supervised loss that is added to the objective."""

    def learn(self, plan: TrainingPlan, metrics: Metrics) -> list[Tensor]:
        """Take one optimizer step for each minibatch and epoch; return the losses."""
        config = self.config
        role = self.role
        experience = plan.experience
        losses = []
        for number, rows in enumerate(plan.minibatches * config.train.max_epochs):
            denominator = role.denominator(
                experience,
                rows,
                length=config.rollout.generate_max_len,
                by_prompt=config.algorithm.loss_agg_mode == "prompt-mean",
            )
            denominator = replace(denominator, updates_before=number)
            metrics.mean(f"{self.phase}/learning_rate", role.scheduler.get_last_lr()[0])

            term = self.ptx_loss.next() if self.ptx_loss is not None else None
            loss, norm = role.update(
                experience, rows, self.objective, denominator, metrics, extra_term=term
            )
            metrics.mean(f"{self.phase}/loss", loss)
            metrics.mean(f"{self.phase}/grad_norm", norm)
            losses.append(loss)
        return losses


class RunStep(Step):
    """A step that can be interrupted between its samples and what is learned from them."""

    def __init__(self, *args: Any, interruption: Interruption, **options: Any):
        super().__init__(*args, **options)
        self.interruption = interruption

    def collect(self, number: int, metrics: Metrics) -> tuple[list[Sample], int]:
        rollback = self.rollout.scheduler.snapshot()
        before = metrics.state_dict()
        version = self.strategy.weight_version
        collected = super().collect(number, metrics)
        self.rollout.rewards.count_failures("rollout/reward_failures", metrics)

        # A checkpoint holds only finished steps, so an interrupted one is undone: the same prompts
        # come again.
        try:
            self.interruption.safe_point()
        except Interrupted:
            rollback()
            metrics.clear()
            metrics.load_state_dict(before)
            self.strategy.engine_lags(version)
            raise
        return collected


class ReplayedStep(Step):
    """A step that learns from the samples that another run has recorded (--replay_rollouts)."""

    def __init__(self, *args: Any, read: Read, **options: Any):
        super().__init__(*args, **options)
        self.read = read

    def collect(self, number: int, metrics: Metrics) -> tuple[list[Sample], int]:
        return self.read(number)


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
        sampler: RunSampler,
        make_experience: ExperienceMaker,
        learners: Sequence[Learner],
        eval_sets: Sequence[HeldOut] = (),
        dump: SampleSink | None = None,
        read: Read | None = None,
        **kwargs,
    ):
        """Set up the trainer.

        `learners` are the models that learn, in order; the policy is the last one. `dump` records
        the samples of each step. `read` returns those of another run, which are learned instead.
        """
        super().__init__(config, strategy, policy, training_data, **kwargs)
        self.policy = policy
        self.rollout = rollout
        self.sampler = sampler
        self.learners = learners
        self.eval_sets = eval_sets
        self.dump = dump

        parts = (strategy, rollout, make_experience, learners)
        options = {"measures": [self._measure], "after": [self._end_step], "trace": self.trace}
        scheduler = rollout.scheduler
        if read is not None:
            self.learning_step = ReplayedStep(*parts, read=read, **options)
        else:
            if isinstance(scheduler, FixedBatch):
                options["meanwhile"] = partial(scheduler.preparing, last=self.total_steps)
            self.learning_step = RunStep(*parts, interruption=self.interruption, **options)

        for each in learners:
            self.models[each.name] = (each.role.module, each.role.optimizer, each.role.scheduler)
        if moves_reference(config.algorithm):
            self.models["reference"] = (policy.reference, None, None)

    def step(self, number: int) -> StepRecord:
        return self.learning_step(number, self.metrics)

    def _measure(self, number: int, samples: list[Sample], version: int, metrics: Metrics) -> None:
        """Record, show and measure the samples of a step."""
        if self.dump is not None:
            self.dump(number, samples, version)
        # Samples of a group come together, so that responses can be compared.
        if self.strategy.mesh.world.rank == 0:
            shown = samples[: self.config.observe.num_trajectories_to_save]
            self.observer.samples(number, sample_rows(shown))
        measure_samples(samples, version, metrics)

    def _end_step(self, number: int, plan: TrainingPlan) -> None:
        if "reference" in self.models:
            self.policy.update_reference(number, self.config.algorithm)
        if plan.store is not None:
            plan.store.clear(plan.experience.rows.tolist())

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
    def learning_roles(self) -> dict[str, Role]:
        return {each.name: each.role for each in self.learners}

    def models_to_save(self) -> dict[str, nn.Module]:
        others = {each.name: each.role.module for each in self.learners[:-1]}
        return super().models_to_save() | others

    @property
    def learned_rows(self) -> PromptSet:
        supervised = [each.ptx_loss.prompts for each in self.learners if each.ptx_loss is not None]
        return sum(supervised, self.prompts)
