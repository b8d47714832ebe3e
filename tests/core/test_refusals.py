"""Why: who calls the core without a run has no command line that checks what is given."""

from functools import partial

import pytest
import torch

from lightrft.core.advantages import CompareRewards, RewardToGo, Stage, grpo
from lightrft.core.batch import Experience
from lightrft.core.experience import ExperienceMaker
from lightrft.core.losses import Denominator, PolicyObjective, Term, ppo
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Prompt, Sample
from lightrft.core.strategy import OneProcess

SAMPLES = [
    Sample(Prompt(0, "?", [1]), 1, [2], [-0.5], "", "stop", reward=reward) for reward in (0.0, 1.0)
]


def experience(estimator, *stages: Stage, **options) -> ExperienceMaker:
    strategy = OneProcess(engine=None)
    compare = CompareRewards(estimator, **options)
    return ExperienceMaker(strategy, compare, stages, minibatch_size=2)


def make(estimator, *stages: Stage) -> None:
    experience(estimator, *stages)(SAMPLES, Metrics())


def learn(loss, *terms: Term) -> None:
    ones = torch.ones(2)
    batch = Experience(
        lengths=torch.tensor([2]),
        input_ids=torch.tensor([1, 2]),
        loss_mask=torch.tensor([False, True]),
        rows=torch.tensor([0]),
        advantages=ones,
    )
    PolicyObjective(loss, terms)(ones, batch, Denominator(ones[0], ones[0]))


class NeedsValues(Stage):
    reads = ("values",)

    def __call__(self, plan, metrics):
        raise AssertionError("a stage ran without what it needs")


class NeedsMoon(Term):
    reads = ("moon",)

    def __call__(self, losses, inputs):
        raise AssertionError("a term ran without what it needs")


def of_reward(rewards, groups, *, reward):
    return rewards


def of_difficulty(rewards, groups, *, difficulty):
    return rewards


def listed(rewards, groups):
    return rewards.tolist()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (partial(CompareRewards, grpo, epss=3), "grpo has no option epss; it has eps"),
        (partial(PolicyObjective, ppo, eps_clip_hihg=9), "ppo has no option eps_clip_hihg; it has"),
        (partial(CompareRewards, of_reward), "of_reward asks for the column 'reward' of the data"),
        (
            partial(make, of_difficulty),
            "row 0: the estimator asks for a number in the column 'diff",
        ),
        (partial(make, listed), "the estimator listed returns .* a finite advantage for each of"),
        (partial(make, partial(listed)), "the estimator functools.partial.* returns"),
        (partial(make, grpo, NeedsValues()), "NeedsValues needs the column 'values', and no stage"),
        (partial(learn, ppo, NeedsMoon()), "the policy gradient needs moon in the batch"),
    ],
)
def test_what_does_not_fit_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_a_stage_may_need_what_the_one_before_has_set():
    class NeedsAdvantages(Stage):
        reads = ("advantages",)

        def __call__(self, plan, metrics):
            plan.experience.advantages = plan.experience.advantages + 1

    plan = experience(grpo, RewardToGo(), NeedsAdvantages(), eps=0.0)(SAMPLES, Metrics())
    half = 0.5**0.5
    assert plan.experience.advantages.tolist() == pytest.approx([1, 1 - half, 1, 1 + half])
