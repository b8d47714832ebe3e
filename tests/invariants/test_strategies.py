"""Why: what a backend does with gradients and parameters must not show.

A constant factor on gradients, a norm over half of them or a decay of the wrong parameters trains
differently, and Adam with clipping hides much of it.

An actor and a critic learn from a fixed experience side by side: weight decay on matrices, warm-up
and cosine, micro-batches, each model clipped by a norm of its own. FSDP2 and ZeRO 0 to 3 are
compared with plain torch, one sequence at a time, with AdamW, and with SGD, which hides nothing.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.roles.rows import dense_scorer, plain_model, plain_scorer
from invariants.test_layouts import (
    MAX_NORM,
    PROMPT,
    RESPONSES,
    TEMPERATURE,
    assert_same_parameters,
    experience,
    sequence_loss,
)
from lightrft.algorithms.roles.critic import Critic
from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.terms import policy_objective
from lightrft.config import Config, ModelSection
from lightrft.core.batch import micro_batches
from lightrft.models.heads import Actor, Scorer
from lightrft.models.load import load_model, load_scorer
from lightrft.strategy import get_strategy
from lightrft.strategy.batching.micro_batches import get_batch, put_batch
from lightrft.strategy.batching.planner import plan
from ranks import run_ranks
from strategy.zero import DeepSpeedStrategy
from tiny import tiny_model

STEPS = 4
RATES = {"adamw": 1e-3, "sgd": 0.1}
DECAY = 0.2
FACTORS = [0.5, 1.0, 1.0, 0.1 + 0.45 * (1 + math.cos(math.pi / 4))]
"""Factors of the learning rate: two steps of warm-up, then a cosine to a tenth over four."""


@dataclass
class TrainingRun:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    """Return the folders of actor and critic."""
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    return folder, dense_scorer(folder, seed=3)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=RATES[kind], momentum=0.5)
    return torch.optim.AdamW(groups, lr=RATES[kind], betas=(0.9, 0.95))


# -- in plain torch


def plain_torch(folders: tuple[str, str], kind: str) -> dict[str, TrainingRun]:
    models = {"actor": plain_model(folders[0]), "critic": plain_scorer(folders[1])}
    optimizers = {name: optimizer_of(model, kind) for name, model in models.items()}
    courses = {name: TrainingRun() for name in models}
    for factor in FACTORS:
        for name, of_sequence in (("actor", sequence_loss), ("critic", squared_error)):
            loss = sum(
                of_sequence(models[name], experience(), index).sum()
                for index in range(len(RESPONSES))
            ) / sum(RESPONSES)
            loss.backward()
            courses[name].losses.append(loss.item())
            courses[name].norms.append(
                nn.utils.clip_grad_norm_(models[name].parameters(), MAX_NORM).item()
            )
            for group in optimizers[name].param_groups:
                group["lr"] = RATES[kind] * factor
            optimizers[name].step()
            optimizers[name].zero_grad()

    for name, model in models.items():
        courses[name].parameters = {
            key: parameter.detach() for key, parameter in model.named_parameters()
        }

    return courses


def squared_error(model: nn.Module, whole: Any, index: int) -> Tensor:
    """Return the squared distance of values to a number that stands in for the return.

    A value is taken in the state before each response token.
    """
    start = int(whole.offsets[index])
    end = int(whole.offsets[index + 1])
    hidden = model.model(whole.input_ids[start:end][None], use_cache=False).last_hidden_state[
        0, PROMPT - 1 : -1
    ]
    return (model.score(hidden)[:, 0] - whole.old_logprobs[start + PROMPT : end]).square()


# -- under a strategy


def trained(folders: tuple[str, str], kind: str, args: dict[str, Any]) -> dict[str, TrainingRun]:
    config = Config()
    for name, value in args.items():
        setattr(config.model if name == "bf16" else config.strategy, name, value)
    config.rollout.temperature = TEMPERATURE
    config.optim.max_norm = MAX_NORM
    config.algorithm.use_kl_loss = True
    config.algorithm.init_kl_coef = 0.1
    config.algorithm.eps_clip_high = 0.3
    config.algorithm.dual_clip = 3.0
    strategy = get_strategy(config)
    assert isinstance(strategy, DeepSpeedStrategy) is not config.strategy.fsdp
    strategy.setup_distributed()

    modules = (
        Actor(load_model(ModelSection(pretrain=folders[0]))),
        Scorer(load_scorer(ModelSection(pretrain=folders[1]))),
    )
    triples = []

    for module in modules:
        optimizer = optimizer_of(module, kind)
        triples.append((module, optimizer, strategy.create_scheduler(optimizer, "cosine", 2, 6)))

    actor, critic = strategy.prepare(*triples)
    roles = {
        "actor": Policy(strategy, *actor, temperature=TEMPERATURE),
        "critic": Critic(strategy, *critic),
    }

    objectives = {"actor": policy_objective(config.algorithm), "critic": squared_errors}
    courses = {name: TrainingRun() for name in roles}
    for _ in range(STEPS):
        for name, (loss, norm) in one_update(strategy, roles, objectives).items():
            courses[name].losses.append(loss.item())
            courses[name].norms.append(norm.item())

    for name, role in roles.items():
        courses[name].parameters = {
            key: tensor.clone() for key, tensor in strategy.full_params(role.module, torch.float32)
        }

    strategy.close()
    return courses


def squared_errors(values: Tensor, batch: Any, denominator: Any) -> tuple[Tensor, dict]:
    return torch.where(
        batch.loss_mask, values - batch.old_logprobs, 0.0
    ).square().sum() / denominator.tokens, {}


def one_update(
    strategy: Any, roles: dict[str, Any], objectives: dict[str, Any]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Accumulate both models at the same time, micro-batch by micro-batch."""
    data = strategy.mesh.data
    whole = experience()
    schedule = plan(
        whole.lengths.tolist(),
        num_ranks=data.size,
        minibatch_size=len(whole),
        max_tokens=30,
        max_sequences=2,
    )
    here = whole.select([row for row in range(len(whole)) if row % data.size == data.rank])
    store = strategy.sample_store()
    rows = schedule.local(data.rank)[0]
    put_batch(store, here)
    store.rows()
    store.move([schedule.rows(rank) for rank in range(data.size)])
    mine = get_batch(store, schedule.rows(data.rank), here)
    assert len(rows) > 1
    for name, role in roles.items():
        role.begin_train_step(objectives[name], role.denominator(mine, rows), len(rows))

    for batch in micro_batches(mine, rows, strategy.to_device):
        for role in roles.values():
            role.train_microbatch(batch)

    return {name: role.finish_train_step() for name, role in roles.items()}


STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "zero 0": {"zero_stage": 0},
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "zero 2, optimizer on the host": {"zero_stage": 2, "adam_offload": True},
    "zero 2, overlapping": {"zero_stage": 2, "overlap_comm": True},
    "zero 3, all on the host": {"zero_stage": 3, "adam_offload": True, "param_offload": True},
    "zero 3, parameters once more in a node": {"zero_stage": 3, "zpg": 2},
}
"""Options to compare.

test_factorisations.py has divided sequences, tests/strategy/test_contract.py the optimizer of stage
1 on the host.
"""


def in_turn(
    folders: tuple[str, str], runs: list[tuple[str, dict[str, Any]]]
) -> list[dict[str, TrainingRun]]:
    return [trained(folders, kind, args) for kind, args in runs]


def assert_equal(found: TrainingRun, expected: TrainingRun, what: object, tolerance: float) -> None:
    for mine, other in ((found.losses, expected.losses), (found.norms, expected.norms)):
        assert mine == pytest.approx(other, rel=tolerance, abs=1e-6), what  # a loss may come near 0
    assert found.parameters.keys() == expected.parameters.keys()
    for name, tensor in found.parameters.items():
        assert (tensor - expected.parameters[name]).norm() <= tolerance * expected.parameters[
            name
        ].norm(), (what, name)


def compare(
    folders: tuple[str, str],
    ranks: int,
    named: dict[str, dict[str, Any]],
    with_adamw: tuple[str, ...] = (),
) -> None:
    """Compare all with SGD, and some with AdamW, after one start of the ranks."""
    runs = [("sgd", args) for args in named.values()]
    runs += [("adamw", named[name]) for name in with_adamw]
    expected = {kind: plain_torch(folders, kind) for kind, _ in runs}
    models = {"actor": plain_model(folders[0]), "critic": plain_scorer(folders[1])}
    start = {name: dict(model.named_parameters()) for name, model in models.items()}
    assert all(
        max(course.norms) > MAX_NORM for courses in expected.values() for course in courses.values()
    ), "all is clipped"

    by_rank = run_ranks(ranks, in_turn, folders, runs, timeout=500)
    for index, (kind, args) in enumerate(runs):
        for results in by_rank:
            for name, course in results[index].items():
                assert_equal(course, expected[kind][name], (kind, args, name), 1e-5)
                assert_same_parameters(
                    course.parameters,
                    expected[kind][name].parameters,
                    start[name],
                    (kind, args, name),
                )


@pytest.mark.slow
def test_zero_3_on_one_rank_is_plain_torch(folders):
    compare(folders, 1, {"zero 3": {"zero_stage": 3}})


@pytest.mark.slow
def test_every_strategy_is_plain_torch(folders):
    """AdamW is tested where optimizers have different parts.

    tests/strategy/test_contract.py has it in every stage of ZeRO.
    """
    compare(folders, 2, STRATEGIES, with_adamw=("fsdp", "zero 1", "zero 3"))


@pytest.mark.slow
def test_no_option_of_zero_changes_anything(folders):
    compare(folders, 2, OPTIONS)


@pytest.mark.slow
def test_zero_on_four_ranks_is_plain_torch(folders):
    named = {
        "zero 2 x sp": {"zero_stage": 2, "sp_size": 2},
        "zero 3, nodes of two": {"zero_stage": 3, "zpg": 2},
    }
    compare(folders, 4, named)


BF16 = {name: args | {"bf16": True} for name, args in STRATEGIES.items() if name != "zero 0"}


@pytest.mark.slow
def test_bf16_stays_near_float32(folders):
    """Within 6 %, as far as rounding goes.

    The stages of ZeRO round alike and agree within 0.3 %.
    """
    expected = plain_torch(folders, "sgd")
    results = run_ranks(
        2, in_turn, folders, [("sgd", args) for args in BF16.values()], timeout=500
    )[0]

    by_name = dict(zip(BF16, results, strict=True))
    for name, courses in by_name.items():
        for role, course in courses.items():
            assert_equal(course, expected[role], (name, role), 6e-2)
            assert course.norms != pytest.approx(expected[role].norms, rel=1e-6), (
                "this was not bfloat16"
            )
            assert_equal(
                course, by_name["zero 2"][role] if name != "fsdp" else course, (name, role), 3e-3
            )
