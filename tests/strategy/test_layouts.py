"""The numbers do not depend on how the run is distributed: all against plain torch in one
process.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import nn

from flat_models import make_batch
from lightrft.config import ModelSection
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.strategy.backends.optim import create_adamw
from ranks import run_cases, run_ranks
from strategy.training import (
    TrainingRun,
    adamw,
    assert_equal_courses,
    distance,
    plain_course,
    sgd,
    strategy,
    strategy_course,
)

SELECTIVE = {"gradient_checkpointing": True, "gradient_checkpointing_policy": "selective"}
REPLICAS = {"dp_replicate": 2}
ON_ALL_RANKS = {"dp_replicate": 0}


def ours(model: nn.Module) -> torch.optim.Optimizer:
    """strategy.create_optimizer without a strategy at hand."""
    return create_adamw(model, 1e-3, (0.9, 0.95), 0.1, 1e-8)


class Case(NamedTuple):
    """Arguments of strategy_course()."""

    optimizer_of: Callable = sgd
    num_micro: int = 1
    early: bool = True
    args: dict = {}
    tied: bool = False


CASES = {
    1: {"sgd": Case(), "adamw": Case(ours), "accumulated": Case(num_micro=4)},
    2: {
        "sgd": Case(),
        "adamw": Case(ours),
        "accumulated": Case(num_micro=4),
        "replicas": Case(args=REPLICAS),
        "accumulated in replicas": Case(num_micro=4, args=REPLICAS),
        "tied": Case(tied=True),
        "checkpointing": Case(num_micro=2, args={"gradient_checkpointing": True}),
        "selective": Case(num_micro=2, args=SELECTIVE),
        "offload": Case(num_micro=2, args=SELECTIVE | {"gradient_checkpointing_policy": "offload"}),
        "on the host": Case(num_micro=2, args={"fsdp_cpu_offload": True}),
        "bf16": Case(num_micro=2, args={"bf16": True}),
        "sgd after prepare": Case(early=False),
        "adamw after prepare": Case(ours, early=False),
    },
    4: {
        "sgd": Case(args=REPLICAS),
        "adamw": Case(ours, args=REPLICAS),
        "a replica each": Case(args=ON_ALL_RANKS),
    },
}
"""By number of ranks; one start for each."""
EXACT = [
    (ranks, name)
    for ranks, cases in CASES.items()
    for name in cases
    if name != "bf16" and "after" not in name
]


@pytest.fixture(scope="module")
def courses(folder, tied_folder) -> Callable[[int], dict[str, list[TrainingRun]]]:
    @cache
    def of(ranks: int) -> dict[str, list[TrainingRun]]:
        cases = {
            name: (
                tied_folder if case.tied else folder,
                case.optimizer_of,
                case.num_micro,
                1.0,
                case.early,
                case.args,
            )
            for name, case in CASES[ranks].items()
        }
        return run_cases(ranks, strategy_course, cases)

    return of


@pytest.fixture(scope="module")
def expected(folder, tied_folder) -> Callable[[Case], TrainingRun]:
    @cache
    def of(tied: bool, optimizer_of: Callable) -> TrainingRun:
        return plain_course(tied_folder if tied else folder, optimizer_of)

    return lambda case: of(case.tied, adamw if case.optimizer_of is ours else sgd)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [pytest.param(*each, marks=[pytest.mark.slow] if each[0] == 4 else []) for each in EXACT],
)
def test_steps_equal_plain_torch(courses, expected, ranks, name):
    case = CASES[ranks][name]
    assert ("lm_head.weight" in expected(case).parameters) is not case.tied
    for course in courses(ranks)[name]:
        assert_equal_courses(course, expected(case))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_optimizer_made_after_prepare_is_the_same(courses, name):
    before = courses(2)[name][0]
    after = courses(2)[f"{name} after prepare"][0]
    assert before.norms == after.norms
    assert distance(before.parameters, after.parameters) == 0


def test_bf16_stays_near_float32_and_keeps_float32_masters(courses, expected):
    course = courses(2)["bf16"][0]
    plain = expected(CASES[2]["bf16"])
    assert abs(course.losses[0] / plain.losses[0] - 1) < 2e-3
    assert abs(course.norms[0] / plain.norms[0] - 1) < 2e-2
    assert 0 < distance(course.parameters, plain.parameters) < 2e-2
    assert all(tensor.dtype == torch.float32 for tensor in course.gradients.values())


def layouts_seen(folder: str) -> list[int]:
    actor = strategy(bf16=True).prepare(Actor(load_model(ModelSection(pretrain=folder))))
    seen = []
    for block in actor.language_model.model.layers:
        block.self_attn.register_forward_pre_hook(
            lambda _, args, options: seen.append(options["layout"]), with_kwargs=True
        )
    actor(make_batch(), 1.0)
    return [sum(other is one for other in seen) for one in seen]


def test_all_layers_share_what_is_known_of_a_batch(folder):
    """FSDP casts what goes into a block, and copies what it finds tensors in."""
    assert run_ranks(1, layouts_seen, folder) == [[2, 2]]
