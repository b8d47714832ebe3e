"""Steps of Muon on every layout equal torch.optim.Muon with AdamW in one process."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightrft.config.errors import ConfigError
from lightrft.strategy.backends import muon
from lightrft.strategy.backends.muon import block_matrices, create_muon, newton_schulz
from lightrft.strategy.fsdp import blocks
from ranks import run_cases, run_ranks, whole
from strategy.lora_course import adapted, disturb
from strategy.training import (
    TrainingRun,
    assert_equal_courses,
    distance,
    load,
    my_rows,
    one_step,
    plain_course,
    rows,
    share_of_loss,
    snapshot,
    strategy,
    strategy_course,
    tokens_learned,
)
from strategy.user_strategies import DataParallelStrategy
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
        chosen = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name.endswith(IN_BLOCKS)
        }
        rest = [parameter for name, parameter in model.named_parameters() if name not in chosen]
        self.model = model
        self.stacks = {
            parameter: [nn.Parameter(expert) for expert in parameter.data]
            for parameter in chosen.values()
            if parameter.ndim == 3
        }
        flat = [parameter for parameter in chosen.values() if parameter.ndim == 2]
        self.muon = muon(
            [*flat, *(parameter for experts in self.stacks.values() for parameter in experts)]
        )
        groups = [
            {
                "params": [parameter for parameter in rest if parameter.ndim >= 2],
                "weight_decay": DECAY,
            },
            {
                "params": [parameter for parameter in rest if parameter.ndim < 2],
                "weight_decay": 0.0,
            },
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
    return create_muon(model, RATE, (0.9, 0.95), DECAY, 1e-8, blocks=blocks(model))


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
        "tp of experts": Case({"tp_size": 2}, num_experts=4),
        "on the host": Case({"fsdp_cpu_offload": True}),
    },
    4: {
        "fsdp": Case(),
        "hsdp": Case({"dp_replicate": 2}),
        "fsdp x tp": Case({"tp_size": 2}),
        "fsdp x tp of experts": Case({"tp_size": 2}, num_experts=4),
        "ep": Case({"ep_size": 2}, num_experts=4),
        "divided experts of ep": Case({"ep_size": 2}, num_experts=2),
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
        pytest.param(ranks, name, marks=[pytest.mark.slow] if ranks > 1 else [])
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
        name: matrix - before[name]
        for name, matrix in course.parameters.items()
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
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.zeros(shape)) for _ in range(3)]
    for matrix in matrices:
        matrix.grad = torch.randn(shape)
    average = torch.stack([each.grad.lerp(0.05 * each.grad, 0.95) for each in matrices])
    torch.optim.Muon(matrices, lr=1 / max(1, shape[0] / shape[1]) ** 0.5, weight_decay=0).step()
    found = newton_schulz(average.bfloat16()).float()
    torch.testing.assert_close(found, -torch.stack(matrices).detach(), rtol=1e-2, atol=1e-3)


def test_singular_vectors_stay_and_singular_values_become_about_one():
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(2, 24, 40), full_matrices=False)
    found = newton_schulz(left @ torch.diag(torch.linspace(0.1, 1, 24)) @ right)
    values = left.mT @ found @ right.mT
    on_diagonal = values.diagonal(dim1=1, dim2=2)
    assert on_diagonal.min() > 0.65 and on_diagonal.max() < 1.25
    assert (values - torch.diag_embed(on_diagonal)).abs().max() < 1e-4
    assert newton_schulz(torch.zeros(1, 3, 4)).count_nonzero() == 0


# -- the work of a rank


class Sent(TorchDispatchMode):
    """While entered, counts all-to-alls and their bytes."""

    count = 0
    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "alltoall_base" in function.name():
            self.count += 1
            self.nbytes += args[1].nbytes
        return function(*args, **(kwargs or {}))


def work_of_a_step(folder: str, args: dict, bucket: int) -> tuple[int, int, list[int]]:
    """Return all-to-alls, the bytes in them, and the elements of each call of Newton-Schulz."""
    muon.MUON_BUCKET = bucket
    made = strategy(optimizer="muon", **args)
    model = load(folder)
    model, optimizer = made.prepare((model, made.create_optimizer(model, RATE)))
    whole_matrices = []

    def recorded(matrices: torch.Tensor) -> torch.Tensor:
        whole_matrices.append(matrices.numel())
        return newton_schulz(matrices)

    muon.newton_schulz = recorded
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Sent() as sent:
        made.optimizer_step(optimizer, model)
    return sent.count, sent.nbytes, whole_matrices


ONE_BUCKET = muon.MUON_BUCKET
LARGEST = 64 * 192
WORK = {
    2: {"fsdp": ({}, ONE_BUCKET), "buckets": ({}, LARGEST), "tp": ({"tp_size": 2}, ONE_BUCKET)},
    4: {"hsdp": ({"dp_replicate": 2}, ONE_BUCKET), "both": ({"tp_size": 2}, ONE_BUCKET)},
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_matrix_is_orthogonalised_once_and_travels_twice(folder, ranks):
    numel = sum(each.numel() for each in block_matrices(blocks(load(folder))))
    cases = {name: (folder, *options) for name, options in WORK[ranks].items()}
    for name, by_rank in run_cases(ranks, work_of_a_step, cases).items():
        axes = 2 if name == "both" else 1
        counts, nbytes, elements = zip(*by_rank, strict=True)
        copies = 2 if name == "hsdp" else 1
        assert sum(map(sum, elements)) == copies * numel, name
        assert sum(nbytes) == 4 * 2 * axes * copies * numel, name
        if name != "buckets":
            assert set(counts) == {2 * axes}, name
            assert max(map(sum, elements)) <= 1.1 * copies * numel / ranks, name
        else:
            assert len(set(counts)) == 1 and counts[0] > 6
            assert max(map(max, elements)) <= 2 * LARGEST


HEIGHTS = (1, 2, 5, 7, 10)


def uneven_update() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return each weight before and after a step whose gradient is the weight itself."""
    made = strategy(optimizer="muon")
    model = nn.Sequential(nn.ModuleList([nn.Linear(6, rows) for rows in HEIGHTS]))
    model, optimizer = made.prepare((model, made.create_optimizer(model, RATE)))
    weights = {name: each for name, each in model.named_parameters() if each.ndim == 2}
    before = {name: whole(each.detach()).clone() for name, each in weights.items()}
    for weight in weights.values():
        weight.grad = weight.detach().clone()
    optimizer.step()
    return {name: (before[name], whole(each.detach())) for name, each in weights.items()}


def test_rows_that_ranks_cannot_divide_evenly():
    """Three ranks: the last one has fewer rows, or none."""
    for updates in run_ranks(3, uneven_update):
        assert len(updates) == len(HEIGHTS)
        for before, after in updates.values():
            scale = RATE * 0.2 * max(before.shape) ** 0.5
            torch.testing.assert_close(after, before - scale * newton_schulz(before[None])[0])


# -- checkpoints


def resumed(folder: str, root: Path, other: Path | None, args: dict) -> list:
    """Return the state after four steps: in one go, from a checkpoint after two, and from another.

    `other` is a folder of another layout. The resumed run is sent to the host and back.
    """
    made = strategy(optimizer="muon", **args)
    states = []
    for source in (None, root, other) if other else (None, root):
        model = load(folder)
        model, optimizer = made.prepare(
            (model, made.create_optimizer(model, RATE, weight_decay=DECAY))
        )
        if source is None:
            for step in range(2):
                one_step(made, model, optimizer, step)
            made.save_ckpt(model, root, "two", optimizer=optimizer)
        else:
            made.load_ckpt(model, source, optimizer=optimizer)
            made.maybe_offload_optimizer(optimizer)
            assert {
                value.device.type
                for state in optimizer.state.values()
                for value in state.values()
                if value.ndim
            } == {"meta"}
            made.maybe_load_optimizer(optimizer)

        for step in range(2, 4):
            one_step(made, model, optimizer, step)
        names = {parameter: name for name, parameter in model.named_parameters()}
        moments = {
            f"{names[parameter]}/{key}": whole(value).clone()
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }
        states.append(snapshot(made, model) | moments)
    return states


@pytest.mark.slow
def test_checkpoints_continue_bit_for_bit_and_on_other_layouts(folders, tmp_path):
    """On one rank, from there to two with tensor parallelism, to four in replicas; and experts."""
    (one,) = run_ranks(1, resumed, folders[0], tmp_path / "one", None, {})
    on_two = run_cases(
        2,
        resumed,
        {
            "tp": (folders[0], tmp_path / "tp", tmp_path / "one", {"tp_size": 2}),
            "ep": (folders[4], tmp_path / "ep", None, {"ep_size": 2}),
        },
    )
    on_four = run_cases(
        4,
        resumed,
        {
            "hsdp": (folders[0], tmp_path / "hsdp", tmp_path / "tp", {"dp_replicate": 2}),
            "fsdp": (folders[4], tmp_path / "fsdp", tmp_path / "ep", {}),
        },
    )
    for states in [one, *on_two["tp"], *on_two["ep"], *on_four["hsdp"], *on_four["fsdp"]]:
        expected, continued, *moved = states
        matrices = {key for key in expected if key.endswith("/momentum_buffer")}
        assert len(matrices) >= 12 and not any("embed" in key for key in matrices)
        assert expected.keys() == continued.keys()
        assert all(torch.equal(continued[name], expected[name]) for name in expected)
        for state in moved:
            assert distance(state, expected) < 1e-5


# -- which parameters


def names_of(model: nn.Module) -> set[str]:
    chosen = set(block_matrices(blocks(model)))
    return {name for name, parameter in model.named_parameters() if parameter in chosen}


def test_matrices_are_in_blocks_and_no_routers(folders):
    assert len(names_of(load(folders[0]))) == 2 * 7
    mixture = names_of(load(folders[4]))
    kinds = {name.split(".", 3)[-1] for name in mixture}
    assert kinds == {
        *(f"self_attn.{each}_proj.weight" for each in "qkvo"),
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    model = load(folders[0]).requires_grad_(False)
    model.lm_head.requires_grad_(True)
    with pytest.raises(ValueError, match="no matrix in a block of Qwen3ForCausalLM is trained"):
        ours(model)


def test_other_strategies_refuse_it():
    made = DataParallelStrategy(args={"optimizer": "muon"})
    with pytest.raises(ConfigError, match="--optimizer muon needs FSDP2: DataParallelStrategy is"):
        made.create_optimizer(nn.Linear(4, 4), RATE)


def adapter_course(folder: str, args: dict) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the number of parameter groups, and by how much two steps change each adapter."""
    made = strategy(optimizer="muon", **args)
    model = disturb(adapted(folder))
    model, optimizer = made.prepare((model, made.create_optimizer(model, RATE)))
    before = adapters(model)
    for step in range(2):
        loss = share_of_loss(model, my_rows(made, step), tokens_learned(rows(step)))
        made.backward(loss, model, optimizer)
        made.optimizer_step(optimizer, model)
    return len(optimizer.param_groups), {
        name: after - before[name] for name, after in adapters(model).items()
    }


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: whole(parameter.detach()).clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def test_adapters_are_matrices_and_learn_alike_on_all_layouts(folder):
    ((num_groups, expected),) = run_ranks(1, adapter_course, folder, {})
    assert num_groups == 1
    cases = {"fsdp": (folder, {}), "tp": (folder, {"tp_size": 2})}
    for by_rank in run_cases(2, adapter_course, cases).values():
        for _, found in by_rank:
            assert distance(found, expected) < 1e-5
