"""Why: between a reward and the gradients of actor and critic lie values, the divergence, GAE,
whitening and two losses. One whole step of PPO, of two updates each, is done again in plain torch,
one sample at a time.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.roles import rows
from lightrft.algorithms.kl import KLCoefficient
from lightrft.algorithms.objectives import ValueObjective
from lightrft.algorithms.shaping import RewardShaper
from lightrft.algorithms.stages.build import experience_maker
from lightrft.algorithms.stages.compare import compare_rewards
from lightrft.algorithms.terms import policy_objective
from lightrft.config import AlgorithmSection, RewardSection, TrainSection
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm
from lightrft.core.samples import Prompt, Sample
from ranks import run_ranks
from tiny import tiny_model

SECTION = AlgorithmSection(
    advantage_estimator="ppo",
    gamma=0.9,
    lambd=0.8,
    value_clip=0.03,
    advantages_norm=True,
    init_kl_coef=0.1,
    kl_estimator="k1",
    eps_clip_low=0.1,
    eps_clip_high=0.1,
    length_filter=[1, 8],
)
LEFT_OUT = 1
"""The row whose response is too long to be learned from."""
SHAPES = [
    (2, 3, 1.0),
    (2, 9, 0.0),
    (1, 4, 2.0),
    (1, 1, -1.0),
    (1, 7, 1.0),
    (3, 2, 0.1),
    (3, 5, 0.1),
    (3, 6, 0.5),
]
"""Tokens of prompt and response, and the reward, of each sample; two optimizer steps of four."""
STEPS = [range(4), range(4, 8)]


def samples() -> list[Sample]:
    return [
        Sample(
            prompt=Prompt(
                index=row, text="", token_ids=[60 + 7 * index for index in range(prompt)]
            ),
            group=row // 2,
            token_ids=[(13 * row + 29 * index) % 250 for index in range(response)],
            logprobs=[0.0] * response,
            text="",
            finish_reason="stop",
            reward=reward,
        )
        for row, (prompt, response, reward) in enumerate(SHAPES)
    ]


# -- as the trainer does it


def step(folders: tuple[str, str, str], held: list[int]) -> dict[str, Any]:
    """Take a step; return values, advantages and returns by row, and [loss, norm] of every update.

    Also return what the parameters became.
    """
    made = rows.strategy()
    policy = rows.policy(made, folders[0], folders[1], max_tokens=24)
    critic = rows.critic(made, folders[2], max_tokens=24)
    data = made.mesh.data
    metrics = Metrics()
    coefficient = KLCoefficient(SECTION.init_kl_coef)
    make = experience_maker(
        policy,
        SECTION,
        TrainSection(train_batch_size=4, max_tokens_per_microbatch=24),
        compare=compare_rewards(SECTION, RewardShaper(RewardSection(), longest=10), {}),
        kl_coefficient=coefficient,
        critic=critic,
    )
    planned = make(samples()[sum(held[: data.rank]) : sum(held[: data.rank + 1])], metrics)

    experience = planned.experience
    numbers = {}
    for name, role, objective in (
        ("critic", critic, ValueObjective(SECTION)),
        ("actor", policy, policy_objective(SECTION, coefficient)),
    ):
        found = []
        for members in planned.minibatches:
            denominator = role.denominator(experience, members)
            found.append(
                torch.stack(
                    role.learn([LossTerm(experience, members, objective, denominator)], metrics)
                )
            )
        numbers[name] = torch.stack(found)

    lengths = experience.lengths.tolist()
    order = experience.rows.tolist()
    columns = {
        name: getattr(experience, name).split(lengths)
        for name in ("values", "advantages", "returns")
    }

    return {
        "rows": {
            row: {name: pieces[index] for name, pieces in columns.items()}
            for index, row in enumerate(order)
        },
        "numbers": numbers,
        "parameters": {
            name: dict(made.full_params(role.module))
            for name, role in (("critic", critic), ("actor", policy))
        },
        "metrics": metrics.reduce(data),
    }


# -- in plain torch


def ids_of(row: int) -> Tensor:
    sample = samples()[row]
    return torch.tensor(sample.prompt.token_ids + sample.token_ids)


def response(row: int) -> slice:
    return slice(SHAPES[row][0], sum(SHAPES[row][:2]))


def logprobs(model: nn.Module, row: int, temperature: float = rows.TEMPERATURE) -> Tensor:
    return rows.plain_logprobs(model, ids_of(row), temperature)[response(row)]


def values(model: nn.Module, row: int) -> Tensor:
    """Of the states before each token of the response."""
    return torch.cat([torch.zeros(1), rows.plain_scores(model, ids_of(row))[:-1]])[response(row)]


def estimate(rewards: list[float], expected: list[float]) -> list[float]:
    advantages = []
    after = 0.0
    following = 0.0
    for reward, value in zip(reversed(rewards), reversed(expected), strict=True):
        after = reward + 0.9 * following - value + 0.9 * 0.8 * after
        following = value
        advantages.append(after)
    return advantages[::-1]


def plain(folders: tuple[str, str, str]) -> dict[str, Any]:
    actor = rows.plain_model(folders[0])
    reference = rows.plain_model(folders[1])

    critic = rows.plain_scorer(folders[2])
    learned = [row for row in range(len(SHAPES)) if row != LEFT_OUT]
    with torch.no_grad():
        before = {
            row: {"old": logprobs(actor, row), "values": values(critic, row)} for row in learned
        }
        for row, known in before.items():
            penalties = (0.1 * (known["old"] - logprobs(reference, row))).tolist()
            rewards = [-penalty for penalty in penalties]
            rewards[-1] += SHAPES[row][2]
            known["raw"] = torch.tensor(estimate(rewards, known["values"].tolist()))
            known["returns"] = known["raw"] + known["values"]

    everything = torch.cat([known["raw"] for known in before.values()])
    for known in before.values():
        known["advantages"] = (known["raw"] - everything.mean()) / everything.std(correction=0)

    def value_loss(row: int) -> Tensor:
        now = values(critic, row)
        known = before[row]
        near = torch.minimum(torch.maximum(now, known["values"] - 0.03), known["values"] + 0.03)
        return 0.5 * torch.maximum((now - known["returns"]) ** 2, (near - known["returns"]) ** 2)

    def policy_loss(row: int) -> Tensor:
        ratio = (logprobs(actor, row) - before[row]["old"]).exp()
        return -torch.minimum(
            ratio * before[row]["advantages"], ratio.clip(0.9, 1.1) * before[row]["advantages"]
        )

    numbers = {"critic": updates(critic, value_loss), "actor": updates(actor, policy_loss)}
    parameters = {
        "critic": dict(critic.named_parameters()),
        "actor": dict(actor.named_parameters()),
    }
    expected, returns = (
        torch.cat([known[name] for known in before.values()]) for name in ("values", "returns")
    )
    explained = 1 - (returns - expected).var(correction=0) / returns.var(correction=0)

    return {
        "rows": before,
        "numbers": numbers,
        "parameters": parameters,
        "explained": explained.item(),
    }


def updates(model: nn.Module, loss_of) -> Tensor:
    """SGD as in rows.prepared(); clipped by the norm of this model alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for number, members in enumerate(STEPS):
        optimizer.param_groups[0]["lr"] = 0.05 * (0.5 if number == 0 else 1.0)
        loss = torch.cat([loss_of(row) for row in members if row != LEFT_OUT]).mean()
        loss.backward()
        found.append([loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()])
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(found)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str, str]:
    path = tmp_path_factory.mktemp("models")
    folder = tiny_model(path / "actor")
    return folder, tiny_model(path / "reference", seed=1), rows.dense_scorer(folder, 5)


@pytest.fixture(scope="module")
def expected(folders) -> dict[str, Any]:
    return plain(folders)


@pytest.mark.parametrize("held", [[8], [3, 5]], ids=str)
def test_a_whole_step_is_plain_torch(folders, expected, held):
    results = run_ranks(len(held), step, folders, held)
    found = {row: columns for result in results for row, columns in result["rows"].items()}
    assert sorted(found) == list(range(len(SHAPES)))

    for row, known in expected["rows"].items():
        for name in ("values", "advantages", "returns"):
            torch.testing.assert_close(
                found[row][name][response(row)], known[name], rtol=1e-4, atol=2e-5
            )

    assert (expected["numbers"]["critic"][:, 1] > 0.5).all(), "clipping matters"
    for name in ("critic", "actor"):
        torch.testing.assert_close(
            results[0]["numbers"][name], expected["numbers"][name], rtol=1e-4, atol=1e-5
        )
        for parameter, tensor in results[0]["parameters"][name].items():
            wanted = expected["parameters"][name][parameter].detach()
            assert (tensor - wanted).norm() <= 1e-5 * wanted.norm(), parameter

    assert results[0]["metrics"]["critic/explained_variance"] == pytest.approx(
        expected["explained"], rel=1e-4
    )
    assert 0 < results[0]["metrics"]["critic/clip"] < 1
