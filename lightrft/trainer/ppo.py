"""PPO and its family: generate samples, score them, estimate advantages, update."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from lightrft.algorithms.objectives import PolicyObjective, ValueObjective, sft
from lightrft.config.sections import Config
from lightrft.data.prompt_set import PromptSet
from lightrft.engine.requests import derived_seed
from lightrft.roles.critic import Critic
from lightrft.roles.draft import Draft
from lightrft.roles.policy import Policy
from lightrft.roles.role import Objective, Role
from lightrft.rollout.collector import Collector
from lightrft.rollout.experience import ExperienceMaker, Planned
from lightrft.rollout.groups import Group
from lightrft.rollout.measure import measure_samples
from lightrft.rollout.overlap import Overlap
from lightrft.run.interruption import Interrupted
from lightrft.run.recorded_samples import RecordedSamples
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.trainer.base import Trainer, TrainingData
from lightrft.trainer.evaluate import HeldOut, ask_judges, evaluate
from lightrft.trainer.tasks.sft import PtxLoss
from lightrft.types import Sample


class PPOTrainer(Trainer):
    """Trainer whose step takes a batch of prompts, a group of samples for each, and one or more
    optimizer steps on them.
    """

    def __init__(
        self,
        config: Config,
        strategy: StrategyBase,
        policy: Policy,
        training_data: TrainingData,
        *,
        collect: Collector,
        make_experience: ExperienceMaker,
        objective: PolicyObjective,
        critic: Critic | None = None,
        draft: Draft | None = None,
        ptx_loss: PtxLoss | None = None,
        eval_sets: Sequence[HeldOut] = (),
        **kwargs,
    ):
        super().__init__(config, strategy, policy, training_data, **kwargs)
        self.policy = policy
        self.strategy.trace = collect.trace = collect.rewards.trace = self.trace

        if self.config.rollout.overlap:
            collect.overlap = Overlap(self._compute_early, strategy.device)
            collect.overlap.trace = self.trace

        self.ptx_loss = ptx_loss
        self.critic = critic
        self.value_objective = ValueObjective(self.config.algorithm)
        if critic is not None:
            self.models["critic"] = (critic.module, critic.optimizer, critic.scheduler)
        self.draft = draft
        if draft is not None:
            self.models["draft"] = (draft.module, draft.optimizer, draft.scheduler)
        self.collect = collect
        self.make_experience = make_experience
        self.objective = objective
        self.eval_sets = eval_sets
        dumped = self.config.rollout.dump_rollouts
        replayed = self.config.rollout.replay_rollouts
        self.dumped = RecordedSamples(dumped, strategy.mesh) if dumped else None
        self.replayed = RecordedSamples(replayed, strategy.mesh) if replayed else None

    def step(self, number: int) -> None:
        if self.replayed is None:
            samples, version = self._collect(number)
        else:
            samples, version = self.replayed.read(
                number, self.prompts, self.policy.truncation.banned
            )

        if self.dumped is not None:
            self.dumped.write(number, samples, version, self.observer.writer)
        self.show(number, samples)
        measure_samples(samples, version, self.metrics)
        with self.trace.phase("experience"):
            planned = self.make_experience(samples, self.metrics)

        generates = number < self.total_steps and self.replayed is None
        with self.collect.preparing(number + 1) if generates else nullcontext():
            if self.critic is not None:
                with self.trace.phase("critic"):
                    self._learn(self.critic, self.value_objective, planned, "critic")
            if self.draft is not None:
                with self.trace.phase("draft"):
                    self._learn(self.draft, sft, planned, "draft")
            if number > self.config.train.freezing_actor_steps:
                with self.trace.phase("train"):
                    self._learn(self.policy, self.objective, planned, "train", self.ptx_loss)

        planned.store.clear(planned.experience.rows.tolist())

    def _collect(self, number: int) -> tuple[list[Sample], int]:
        """Return this rank's samples of a step with their rewards, and the version of the engine's
        newest weights.
        """
        safe_state = self.collect.begin(), self.metrics.state_dict(), self.strategy.weight_version
        with self.trace.phase("generate"), self.strategy.engine_awake(self.policy.actor):
            ahead = min(self.config.rollout.max_staleness, self.total_steps - number)
            groups = self.collect(number, self.metrics, ahead=ahead)
            self.collect.rewards.ask_judge(
                [sample for group in groups for sample in group.responses]
            )

        with self.trace.phase("reward"):
            samples = self.collect.score(groups, self.metrics)
        self._safe_point(*safe_state)
        return samples, self.strategy.weight_version

    def _compute_early(self, groups: list[Group]) -> None:
        """Compute what models say of complete groups before the step, and their scores by reward
        models.
        """
        self.make_experience.compute_early([sample for group in groups for sample in group.samples])
        if self.collect.rewards.models is not None:
            self.collect.rewards.models.compute_early(
                [sample for group in groups for sample in group.responses]
            )

    def _safe_point(
        self, take_back: Callable[[], None], metrics: dict[str, Any], weight_version: int
    ) -> None:
        """Undo the step on an interruption: a checkpoint holds only finished steps, and the same
        prompts come again.
        """
        try:
            self.interruption.safe_point()
        except Interrupted:
            take_back()
            self.metrics.clear()
            self.metrics.load_state_dict(metrics)
            self.strategy.engine_lags(weight_version)
            raise

    def evaluate(self) -> None:
        """Add `eval/*` metrics of --eval_data.

        The engine keeps its weight version: versions count steps, and the next step streams these
        same weights under it.
        """
        version = self.strategy.weight_version
        with self.strategy.engine_awake(self.policy.actor):
            seed = self.config.train.seed
            answer = self.collect.sampler.answer
            answered = [
                answer(
                    each.prompts, seed=derived_seed(seed, "evaluation", self.done, *each.seed_parts)
                )
                for each in self.eval_sets
            ]
            ask_judges(self.eval_sets, answered)

        self.strategy.engine_lags(version)
        for each, groups in zip(self.eval_sets, answered, strict=True):
            evaluate(each, groups, self.metrics, self.strategy.mesh.data)

    def models_to_save(self) -> dict[str, nn.Module]:
        others = {"critic": self.critic, "draft": self.draft}
        return super().models_to_save() | {
            name: role.module for name, role in others.items() if role is not None
        }

    @property
    def learned_rows(self) -> PromptSet:
        return self.prompts + self.ptx_loss.prompts if self.ptx_loss is not None else self.prompts

    def _learn(
        self,
        role: Role,
        objective: Objective,
        planned: Planned,
        phase: str,
        ptx_loss: PtxLoss | None = None,
    ) -> None:
        """Take one optimizer step per minibatch and epoch.

        The targets of one role do not depend on the other's updates.
        """
        for rows in planned.minibatches * self.config.train.max_epochs:
            denominator = role.denominator(
                planned.experience, rows, length=self.config.rollout.generate_max_len
            )
            self.metrics.mean(f"{phase}/learning_rate", role.scheduler.get_last_lr()[0])
            term = ptx_loss.next() if ptx_loss is not None else None
            loss, norm = role.update(
                planned.experience, rows, objective, denominator, self.metrics, extra_term=term
            )
            self.metrics.mean(f"{phase}/loss", loss)
            self.metrics.mean(f"{phase}/grad_norm", norm)
