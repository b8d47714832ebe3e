"""Steps of Muon on every layout equal torch.optim.Muon with AdamW in one process."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from lightrft.backends.muon import block_matrices, create_muon, newton_schulz
from lightrft.strategy.fsdp import blocks
from ranks import run_cases, run_ranks
from strategy.training import (
    TrainingRun,
    assert_equal_courses,
    distance,
    load,
    one_step,
    plain_course,
    strategy,
    strategy_course,
)
from tiny import tiny_experts

RATE = 1e-3
DECAY = 0.1
IN_BLOCKS = ("_proj.weight", "_proj")
"""Ends of the names of matrices and of stacked experts."""


class PaperMuon:
    """Muon as in the papers, in float32: torch's own rounds to bfloat16."""

    def __init__(self, matrices: list[nn.Parameter]):
        self.momenta = {each: torch.zeros_like(each) for each in matrices}

    @torch.no_grad()
    def step(self) -> None:
        for matrix, momentum in self.momenta.items():
            momentum.mul_(0.95).add_(0.05 * matrix.grad)
            x = 0.95 * momentum + 0.05 * matrix.grad
            height, width = x.shape
            x = x / x.norm()
            for _ in range(5):
                if height > width:
                    gram = x.T @ x
                    x = 3.4445 * x + x @ (-4.775 * gram + 2.0315 * gram @ gram)
                else:
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
            matrix.mul_(1 - RATE * DECAY)
            matrix.sub_(RATE * 0.2 * max(height, width) ** 0.5 * x)


def torch_muon(matrices: list[nn.Parameter]) -> torch.optim.Muon:
    return torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")


class PlainOptimizer:
    """A plain Muon and torch's AdamW. Each expert is a matrix in the memory of the stack."""

    def __init__(self, model: nn.Module, muon: Callable = PaperMuon):
        chosen = {name: each for name, each in model.named_parameters() if name.endswith(IN_BLOCKS)}
        rest = [each for name, each in model.named_parameters() if name not in chosen]
        self.model = model
        self.stacks = {
            each: [nn.Parameter(expert) for expert in each.data]
            for each in chosen.values()
            if each.ndim == 3
        }
        flat = [each for each in chosen.values() if each.ndim == 2]
        self.muon = muon([*flat, *(each for experts in self.stacks.values() for each in experts)])
        groups = [
            {"params": [each for each in rest if each.ndim >= 2], "weight_decay": DECAY},
            {"params": [each for each in rest if each.ndim < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), foreach=False)

    def step(self) -> None:
        for stack, experts in self.stacks.items():
            for expert, gradient in zip(experts, stack.grad, strict=True):
                expert.grad = gradient
        self.muon.step()
        self.adamw.step()

    def zero_grad(self) -> None:
        self.model.zero_grad()


def ours(model: nn.Module) -> torch.optim.Optimizer:
    return create_muon(model, blocks(model), RATE, (0.9, 0.95), DECAY, 1e-8)


class Case(NamedTuple):
    """Arguments of strategy_course(), and how many experts a layer has."""

    args: dict = {}
    num_experts: int = 0
    early: bool = True


CASES = {
    1: {"plain": Case(), "experts": Case(num_experts=4)},
    2: {
        "fsdp": Case(),
        "after prepare": Case(early=False),
        "replicas": Case({"dp_replicate": 0}),
        "tp": Case({"tp_size": 2}),
        "ep": Case({"ep_size": 2}, num_experts=4),
        "on the host": Case({"fsdp_cpu_offload": True}),
    },
    4: {
        "fsdp": Case(),
        "hsdp": Case({"dp_replicate": 2}),
        "fsdp x tp": Case({"tp_size": 2}),
        "ep": Case({"ep_size": 2}, num_experts=4),
        "divided experts": Case(num_experts=2),
    },
}
"""By number of ranks; one start for each."""


@pytest.fixture(scope="module")
def folders(folder, tmp_path_factory) -> dict[int, str]:
    """By number of experts."""
    mixtures = {
        number: tiny_experts(tmp_path_factory.mktemp(f"experts{number}"), number)
        for number in (2, 4)
    }
    return {0: folder} | mixtures


@pytest.fixture(scope="module")
def courses(folders) -> Callable[[int], dict[str, list[TrainingRun]]]:
    @cache
    def of(ranks: int) -> dict[str, list[TrainingRun]]:
        cases = {
            name: (folders[case.num_experts], ours, 1, 1.0, case.early, case.args)
            for name, case in CASES[ranks].items()
        }
        return run_cases(ranks, strategy_course, cases)

    return of


@pytest.fixture(scope="module")
def expected(folders) -> Callable[[int], TrainingRun]:
    return cache(lambda num_experts: plain_course(folders[num_experts], PlainOptimizer))


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, marks=[pytest.mark.slow] if ranks == 4 else [])
        for ranks, cases in CASES.items()
        for name in cases
    ],
)
def test_steps_equal_those_of_torch(courses, expected, ranks, name):
    for course in courses(ranks)[name]:
        assert_equal_courses(course, expected(CASES[ranks][name].num_experts))


def change(course: TrainingRun, folder: str) -> dict[str, torch.Tensor]:
    """What the steps have added to the matrices of the blocks."""
    before = load(folder).state_dict()
    return {
        name: each - before[name]
        for name, each in course.parameters.items()
        if name.endswith(IN_BLOCKS)
    }


@pytest.mark.parametrize("num_experts", [0, 4])
def test_only_bfloat16_lies_between_this_and_torch_muon(courses, folders, num_experts):
    name = "experts" if num_experts else "plain"
    folder = folders[num_experts]
    torch_course = plain_course(folder, partial(PlainOptimizer, muon=torch_muon))
    found = distance(change(courses(1)[name][0], folder), change(torch_course, folder))
    assert 1e-4 < found < 0.02


@pytest.mark.parametrize("shape", [(32, 64), (64, 32), (48, 48)])
def test_bfloat16_matrices_become_what_torch_makes_of_them(shape):
    matrices = [nn.Parameter(torch.zeros(shape)) for _ in range(3)]
    for matrix in matrices:
        matrix.grad = torch.randn(shape)
    average = torch.stack([each.grad.lerp(0.05 * each.grad, 0.95) for each in matrices])
    torch.optim.Muon(matrices, lr=1 / max(1, shape[0] / shape[1]) ** 0.5, weight_decay=0).step()
    found = newton_schulz(average.bfloat16()).float()
    torch.testing.assert_close(found, -torch.stack(matrices).detach(), rtol=1e-2, atol=1e-3)
    assert 0.5 < torch.linalg.svdvals(found).min() and torch.linalg.svdvals(found).max() < 1.3
