"""Training on padded rows equals plain torch, one row at a time.

This holds for every number of ranks and every size of micro-batch.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from algorithms.roles import rows
from lightrft.algorithms.objectives import sft
from lightrft.algorithms.roles.role import DistributedRole
from lightrft.algorithms.terms import policy_objective
from lightrft.config import Config
from lightrft.core.losses import PolicyObjective, sequence_mean, token_mean
from ranks import run_ranks

GBS = 4
STEPS = [range(0, 4), range(4, 8), range(8, 10)]
LIMITS = [{"mbs": None}, {"mbs": 1}, {"mbs": 2}, {"mbs": 2, "max_tokens": 33}, {"max_tokens": 20}]
LIMITS += [{"mbs": 2, "batching": "plain"}, {"max_tokens": 33, "batching": "dynamic"}]
Trained = tuple[list[Tensor], dict[str, Tensor]]


def batch_of(kind: str) -> rows.Padded:
    """Return columns for the losses below; what is not learned is noise there too."""
    generator = torch.Generator().manual_seed(5)
    shape = (len(rows.LENGTHS), rows.WIDTH)
    columns = {
        "sft": {},
        "grpo": {
            "advantages": torch.randn(shape, generator=generator),
            "old_logprobs": -5 + torch.randn(shape, generator=generator),
            "engine_logprobs": -5 + torch.randn(shape, generator=generator),
        },
        "own": {
            "teacher": torch.rand(shape, generator=generator),
            "trust": torch.rand(shape[0], generator=generator),
        },
        "critic": {"returns": torch.randn(shape, generator=generator)},
        "reward": {"grade": torch.randn(shape[0], generator=generator)},
    }
    batch = rows.whole() | columns[kind]
    if kind == "reward":
        del batch["token_mask"]

    return batch


def loss_of_user(logprobs, batch, denominator):
    """Read columns that only this test has: one per token, one per row."""
    values = batch.trust[batch.sequence_ids] * (logprobs - batch.teacher) ** 2
    return sequence_mean(values, batch, denominator), {"own/gap": values, "own/gap_max": values}


def regression(values, batch, denominator):
    return token_mean((values - batch.returns) ** 2, batch, denominator), {"value": values}


def grading(scores, batch, denominator):
    """Return the mean square over rows that are not masked."""
    here = torch.zeros(len(batch)).index_add(0, batch.sequence_ids, batch.loss_mask.float()) > 0
    return torch.where(here, (scores - batch.grade) ** 2, 0.0).sum() / denominator.sequences, {
        "score": scores
    }


def clipped(section_mode: str = "token-mean") -> PolicyObjective:
    section = Config().algorithm
    section.loss_agg_mode = section_mode
    return policy_objective(section)


LOSSES: dict[str, Callable] = {
    "sft": sft,
    "grpo": clipped(),
    "own": loss_of_user,
    "critic": regression,
    "reward": grading,
}


def role_for(kind: str, made, folder: str, **options) -> DistributedRole:
    return {"critic": rows.critic, "reward": rows.reward_model}.get(kind, rows.policy)(
        made, folder, **options
    )


def trained(kind: str, folder: str, limits: list[dict]) -> list[Trained]:
    made = rows.strategy()
    results = []
    mine = rows.share(batch_of(kind), made.get_rank(), made.mesh.data.size)
    for limit in limits:
        role = role_for(
            kind,
            made,
            folder,
            max_tokens=limit.get("max_tokens", 1000),
            batching=limit.get("batching", "packed"),
        )
        result = role.train(mine, LOSSES[kind], gbs=GBS, mbs=limit.get("mbs"))
        numbers = torch.stack([result["loss"], result["grad_norm"]], 1)
        results.append(
            (numbers, {name: tensor.clone() for name, tensor in made.full_params(role.module)})
        )

    return results


def plain(kind: str, folder: str) -> Trained:
    model = (
        rows.plain_model(folder) if kind in ("sft", "grpo", "own") else rows.plain_scorer(folder)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    batch = batch_of(kind)
    numbers = []
    for step, members in enumerate(STEPS):
        optimizer.param_groups[0]["lr"] = 0.05 * (0.5 if step == 0 else 1.0)
        loss = PLAIN[kind](model, batch, [row for row in members if row != 3])
        loss.backward()
        numbers.append([loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()])
        optimizer.step()
        optimizer.zero_grad()

    return torch.tensor(numbers), {
        name: parameter.detach() for name, parameter in model.named_parameters()
    }


def learned(row: int) -> slice:
    return slice(rows.PROMPT[row], rows.LENGTHS[row])


def logprobs(model: nn.Module, batch: rows.Padded, row: int) -> Tensor:
    return rows.plain_logprobs(model, batch["input_ids"][row, : rows.LENGTHS[row]])[learned(row)]


def plain_sft(model, batch, members):
    return -torch.cat([logprobs(model, batch, row) for row in members]).mean()


def plain_grpo(model, batch, members):
    losses = []
    for row in members:
        ratio = (logprobs(model, batch, row) - batch["old_logprobs"][row, learned(row)]).exp()
        advantage = batch["advantages"][row, learned(row)]
        losses.append(-torch.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage))
    return torch.cat(losses).mean()


def plain_loss_of_user(model, batch, members):
    """Compute loss_of_user() in plain torch; rows without a response do not count."""
    gaps = [
        (logprobs(model, batch, row) - batch["teacher"][row, learned(row)]) ** 2
        * batch["trust"][row]
        for row in members
    ]
    return torch.stack([gap.mean() for gap in gaps if len(gap)]).mean()


def plain_critic(model, batch, members):
    losses = []
    for row in members:
        scores = rows.plain_scores(model, batch["input_ids"][row, : rows.LENGTHS[row]])
        losses.append(scores[rows.PROMPT[row] - 1 : -1] - batch["returns"][row, learned(row)])
    return torch.cat(losses).square().mean()


def plain_reward(model, batch, members):
    scores = [
        rows.plain_scores(model, batch["input_ids"][row, : rows.LENGTHS[row]])[-1]
        for row in members
    ]
    return (torch.stack(scores) - batch["grade"][members]).square().mean()


PLAIN = {
    "sft": plain_sft,
    "grpo": plain_grpo,
    "own": plain_loss_of_user,
    "critic": plain_critic,
    "reward": plain_reward,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PLAIN))
def test_every_layout_is_plain_torch(folder, scorer_folder, kind):
    path = scorer_folder if kind in ("critic", "reward") else folder
    expected, parameters = plain(kind, path)
    assert (expected[:, 1] > 0.5).any()  # clipping matters

    for world_size in (1, 2, 4):
        for numbers, found in run_ranks(
            world_size, trained, kind, path, LIMITS if kind == "sft" else LIMITS[3:6]
        )[0]:
            torch.testing.assert_close(numbers, expected, rtol=1e-5, atol=1e-6)
            assert found.keys() == parameters.keys()
            for name, tensor in found.items():
                assert (tensor - parameters[name]).norm() <= 1e-5 * parameters[name].norm(), name


def reported(folder: str, mbs: int | None):
    made = rows.strategy()
    mine = rows.share(batch_of("own"), made.get_rank(), made.mesh.data.size)
    role = rows.policy(made, folder)
    return role.train(mine, loss_of_user, mbs=mbs, eval_mode=True)


@pytest.mark.parametrize(("world_size", "mbs"), [(1, None), (2, 1), (4, 2)])
def test_metrics_have_every_microbatch_of_all_ranks(folder, world_size, mbs):
    """Weighted by their tokens, the lists give the mean over everything.

    Every rank has the lists of all ranks.
    """
    results = run_ranks(world_size, reported, folder, mbs)
    metrics = results[0]["metrics"]
    assert all(result["metrics"] == result["all_mb_metrics"] == metrics for result in results)
    batch = batch_of("own")

    model = rows.plain_model(folder)
    gaps = []
    with torch.no_grad():
        for row in range(len(rows.LENGTHS)):
            if row != 3:
                gaps.append(
                    (logprobs(model, batch, row) - batch["teacher"][row, learned(row)]) ** 2
                    * batch["trust"][row]
                )

    tokens = torch.tensor(metrics["tokens"])
    means = torch.tensor(metrics["own/gap"])
    assert tokens.sum() == len(torch.cat(gaps))
    if mbs == 1:
        assert sorted(metrics["tokens"]) == sorted(len(gap) for gap in gaps if len(gap))
    torch.testing.assert_close(
        (tokens * means).sum() / tokens.sum(), torch.cat(gaps).mean(), rtol=1e-5, atol=0
    )

    torch.testing.assert_close(
        torch.tensor(metrics["own/gap_max"]).max(), torch.cat(gaps).max(), rtol=1e-5, atol=0
    )
    assert set(metrics) == {"tokens", "own/gap", "own/gap_max", "train/entropy"}
    assert {len(values) for values in metrics.values()} == {len(tokens)}


def evaluated(folder: str):
    """Return the results of eval_mode and then of training.

    Also whether the first left anything behind.
    """
    made = rows.strategy()
    mine = rows.share(batch_of("sft"), made.get_rank(), made.mesh.data.size)
    role = rows.policy(made, folder)
    before = {name: tensor.clone() for name, tensor in made.full_params(role.module)}
    first = role.train(mine, sft, eval_mode=True)
    untouched = all(
        torch.equal(tensor, before[name]) for name, tensor in made.full_params(role.module)
    )

    clean = (
        all(parameter.grad is None for parameter in role.module.parameters())
        and not role.optimizer.state
    )
    return first, role.train(mine, sft), untouched and clean and role.scheduler.last_epoch == 1


def test_eval_mode_computes_and_learns_nothing(folder):
    expected = rows.whole()
    model = rows.plain_model(folder)
    with torch.no_grad():
        loss = plain_sft(model, expected, [row for row in range(10) if row != 3])
    for first, second, untouched in run_ranks(2, evaluated, folder):
        torch.testing.assert_close(first["loss"], loss[None], rtol=1e-5, atol=0)
        torch.testing.assert_close(first["loss"], second["loss"], rtol=1e-6, atol=0)
        assert first["grad_norm"].tolist() == [0.0] and second["grad_norm"].item() > 0.1
        assert untouched


def aggregated(folder: str):
    made = rows.strategy(generate_max_len=40)
    mine = rows.share(batch_of("grpo"), made.get_rank(), made.mesh.data.size)
    role = rows.policy(made, folder)
    losses = {}
    for mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        losses[mode] = role.train(mine, clipped(mode), eval_mode=True)["loss"].item()
    return losses


def test_the_constant_length_is_that_of_the_longest_response(folder):
    losses = run_ranks(2, aggregated, folder)[0]
    assert losses["seq-mean-token-sum-norm"] == pytest.approx(
        losses["seq-mean-token-sum"] / 40, rel=1e-5
    )
