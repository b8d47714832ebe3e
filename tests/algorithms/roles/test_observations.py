"""The policy learns what its environment answered (--observation_coef), as plain torch does."""

import pytest
import torch

from algorithms.roles import rows
from lightrft.algorithms.stages.tokens import LearnedObservations
from lightrft.algorithms.terms import OBSERVATIONS, policy_objective
from lightrft.config import AlgorithmSection
from lightrft.core.batch import TrainingPlan
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm
from ranks import run_ranks

COEFFICIENT = 0.5


def batch_of_episodes() -> rows.Padded:
    """Every third token of a response, and the one after it, come from the environment."""
    batch = rows.whole()
    generator = torch.Generator().manual_seed(7)
    turns = (torch.arange(rows.WIDTH) - torch.tensor(rows.PROMPT)[:, None]) % 3 == 0
    return batch | {
        "token_mask": batch["token_mask"] & turns,
        "advantages": torch.randn(turns.shape, generator=generator),
        "engine_logprobs": torch.zeros(turns.shape),
    }


def observed() -> torch.Tensor:
    """Return the observations of batch_of_episodes(), [10, WIDTH]: row 3 is masked."""
    columns = torch.arange(rows.WIDTH)
    response = (columns > torch.tensor(rows.PROMPT)[:, None]) & (
        columns < torch.tensor(rows.LENGTHS)[:, None]
    )
    kept = torch.arange(len(rows.LENGTHS)) != 3
    return response & ~batch_of_episodes()["token_mask"] & kept[:, None]


def learned(folder: str, mbs: int):
    made = rows.strategy()
    policy = rows.policy(made, folder)
    batch = rows.share(batch_of_episodes(), made.get_rank(), made.mesh.data.size)
    flat, (members,) = policy.redistribute(batch, mbs=mbs)
    plan = TrainingPlan(flat, [members])
    LearnedObservations(COEFFICIENT, made.data.sum)(plan, Metrics())

    flat = plan.experience
    objective = policy_objective(AlgorithmSection(observation_coef=COEFFICIENT))
    metrics = Metrics()
    term = LossTerm(flat, members, objective, policy.denominator(flat, members))
    loss, norm = policy.learn([term], metrics)
    reported = metrics.reduce(made.mesh.world)["train/observation_loss"]
    weights = getattr(flat, OBSERVATIONS).sum()
    return loss, norm, reported, weights, dict(made.full_params(policy.actor))


def plain(folder: str):
    model = rows.plain_model(folder)
    batch = batch_of_episodes()
    mask = batch["token_mask"] & batch["sample_mask"][:, None]
    seen = observed()
    actions = torch.zeros(())
    answers = torch.zeros(())
    for row, length in enumerate(rows.LENGTHS):
        logprobs = rows.plain_logprobs(model, batch["input_ids"][row, :length])
        actions = actions - (batch["advantages"][row, :length] * logprobs)[mask[row, :length]].sum()
        answers = answers - logprobs[seen[row, :length]].sum()

    surprise = answers / seen.sum()
    loss = actions / mask.sum() + COEFFICIENT * surprise
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    # the first rate of the schedule
    torch.optim.SGD(model.parameters(), lr=0.05 * 0.5).step()
    # on policy the ratio is 1, so its loss is the mean of -A
    value = COEFFICIENT * surprise - batch["advantages"][mask].mean()
    return value.detach(), norm, surprise.item(), dict(model.named_parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_with_observations_is_plain_torchs(folder, world_size):
    loss, norm, surprise, parameters = plain(folder)
    results = run_ranks(world_size, learned, folder, 2)
    for found, found_norm, reported, _, found_parameters in results:
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(found_norm, norm)
        assert reported == pytest.approx(surprise, rel=1e-5)
        for name, value in parameters.items():
            torch.testing.assert_close(found_parameters[name], value.detach())
    assert sum(weights for *_, weights, _ in results).item() == pytest.approx(COEFFICIENT)
