"""PPO and its family: sample, judge, estimate advantages, update."""

from lightrft.algorithms.objectives import PolicyObjective
from lightrft.rollout.experience import ExperienceMaker, Planned
from lightrft.rollout.measure import measure_samples
from lightrft.rollout.rewards import Judge
from lightrft.rollout.sampler import Sampler
from lightrft.trainer.base import Trainer
from lightrft.trainer.evaluate import evaluate


class PPOTrainer(Trainer):
    """One step: a batch of prompts, a group of samples each, one or more optimizer steps on them."""

    def __init__(
        self,
        *args,
        sampler: Sampler,
        judge: Judge,
        make_experience: ExperienceMaker,
        objective: PolicyObjective,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.sampler, self.judge, self.make_experience, self.objective = sampler, judge, make_experience, objective

    def step(self, number: int) -> None:
        prompts = [self.prompts[row] for row in self.order.rows(number - 1)]
        with self.trace.phase("generate"), self.strategy.engine_awake(self.policy.actor):
            samples = self.sampler(prompts, seed=self.config.train.seed * 1_000_003 + number)
        with self.trace.phase("reward"):
            self.judge(samples)
        self.interruption.safe_point()
        self.show(number, samples)
        measure_samples(samples, self.strategy.weight_version, self.metrics)
        with self.trace.phase("experience"):
            planned = self.make_experience(samples, self.metrics)
        with self.trace.phase("train"):
            for _ in range(self.config.train.max_epochs):
                self._update(planned)

    def evaluate(self) -> None:
        with self.strategy.engine_awake(self.policy.actor):
            evaluate(self.sampler, self.judge, self.eval_prompts, self.metrics)

    def _update(self, planned: Planned) -> None:
        """One optimizer step per minibatch."""
        for rows in planned.minibatches:
            denominator = self.policy.denominator(planned.experience, rows, length=self.config.rollout.generate_max_len)
            self.metrics.mean("train/learning_rate", self.policy.scheduler.get_last_lr()[0])
            loss, norm = self.policy.update(planned.experience, rows, self.objective, denominator, self.metrics)
            self.metrics.mean("train/loss", loss)
            self.metrics.mean("train/grad_norm", norm)
