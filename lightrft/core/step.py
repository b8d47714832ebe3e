"""One step: generate groups for a batch of prompts, score them, compare them, learn."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field

from torch import Tensor

from lightrft.core.batch import Batch, Rows, TrainingPlan
from lightrft.core.metrics import Metrics, Untraced
from lightrft.core.role import Learner
from lightrft.core.rollout import Rollout
from lightrft.core.samples import Sample
from lightrft.core.strategy import Strategy

Measure = Callable[[int, list[Sample], int, Metrics], None]
"""Function of a step's number, the samples, and the version of the engine's newest weights."""
Around = Callable[[int, TrainingPlan], AbstractContextManager[None]]
"""Function of a step's number and what is learned in it."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Batch, samples and losses of a step on this rank."""

    batch: Batch
    minibatches: Sequence[Rows]
    losses: Sequence[Tensor]
    """Global loss of each optimizer step, [] on the device."""
    samples: Sequence[Sample] = ()
    """Samples that this rank's replica generated; none in supervised training."""


@dataclass
class Step:
    """Trains on generated samples. All ranks call it together.

    step = Step(strategy, rollout, make_experience, [Learner("actor", policy, objective)])
    for number in range(1, 101):
        step(number, metrics)
    """

    strategy: Strategy
    rollout: Rollout
    make_experience: Callable[[list[Sample], Metrics], TrainingPlan]
    learners: Sequence[Learner]
    """Models that learn, in order; the policy is the last one, and its module generates."""
    _: KW_ONLY
    measures: Sequence[Measure] = ()
    """What sees the samples of a step."""
    around: Around = field(default=lambda number, plan: nullcontext())
    """Returns a context around learning."""
    trace: Untraced = field(default_factory=Untraced)

    def __call__(self, number: int, metrics: Metrics) -> StepRecord:
        samples, version = self.collect(number, metrics)
        for measure in self.measures:
            measure(number, samples, version, metrics)

        with self.trace.phase("experience"):
            plan = self.make_experience(samples, metrics)

        losses = []
        with self.around(number, plan):
            for learner in self.learners:
                if number >= learner.first_step:
                    with self.trace.phase(learner.phase):
                        losses += learner.learn(plan, metrics)

        return StepRecord(plan.experience, plan.minibatches, losses, samples)

    def collect(self, number: int, metrics: Metrics) -> tuple[list[Sample], int]:
        """Generate and score this rank's samples; return them and the engine's weight version."""
        actor = self.learners[-1].role.module
        with self.trace.phase("generate"), self.strategy.engine_awake(actor):
            groups = self.rollout.collect(number, metrics)
        with self.trace.phase("reward"):
            samples = self.rollout.score(groups)
        return samples, self.strategy.weight_version
