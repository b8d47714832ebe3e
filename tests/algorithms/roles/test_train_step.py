"""The split form of an optimizer step: begin, micro-batches, finish."""

import pytest
import torch

from algorithms.roles import rows
from lightrft.algorithms.objectives import sft
from lightrft.algorithms.roles.policy import Policy
from lightrft.core.batch import micro_batches
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm
from ranks import run_ranks, whole


def start(folder: str, **args) -> tuple[Policy, rows.Padded]:
    made = rows.strategy(**args)
    return rows.policy(made, folder), rows.share(rows.whole(), made.get_rank(), made.mesh.data.size)


def state(policy: Policy):
    moments = [whole(value["momentum_buffer"]) for value in policy.optimizer.state.values()]
    parameters = [tensor.clone() for _, tensor in policy.strategy.full_params(policy.actor)]
    return parameters, moments, policy.scheduler.last_epoch


def by_hand(policy: Policy, batch: rows.Padded):
    """Take one step over all rows in micro-batches of one row."""
    flat, (members,) = policy.redistribute(batch, mbs=1)
    term = LossTerm(flat, members, sft, policy.denominator(flat, members))
    policy.begin(len(members))
    for micro_batch in micro_batches(flat, members, policy.strategy.to_device):
        policy.add_gradients(micro_batch, term)
    return policy.finish()


def three_ways(folder: str):
    results = []
    for way in ("train", "by hand", "learn"):
        policy, batch = start(folder)
        for _ in range(2):
            if way == "train":
                found = policy.train(batch, sft, mbs=1)
                numbers = found["loss"][0], found["grad_norm"][0]
            elif way == "by hand":
                numbers = by_hand(policy, batch)
            else:
                flat, (members,) = policy.redistribute(batch, mbs=1)
                numbers = policy.learn(
                    [LossTerm(flat, members, sft, policy.denominator(flat, members))], Metrics()
                )

        results.append((torch.stack(numbers), state(policy)))

    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_split_form_is_the_whole(folder, world_size):
    for train, hand, learned in run_ranks(world_size, three_ways, folder):
        torch.testing.assert_close(hand, train, rtol=0, atol=0)
        torch.testing.assert_close(learned, train, rtol=0, atol=0)


def begun_twice(folder: str):
    policy, _ = start(folder)
    policy.begin(2)
    with pytest.raises(RuntimeError) as caught:
        policy.begin(2)
    return str(caught.value)


def test_a_step_is_finished_before_the_next_begins(folder):
    says = "an optimizer step is open: call finish() first"
    assert run_ranks(1, begun_twice, folder) == [says]


def without_optimizer(folder: str):
    policy, batch = start(folder)
    policy.optimizer = policy.scheduler = None
    loss = policy.train(batch, sft, eval_mode=True)["loss"].item()
    with pytest.raises(ValueError) as caught:
        policy.train(batch, sft)
    return loss > 0, str(caught.value)


def test_a_role_without_optimizer_only_infers(folder):
    assert run_ranks(1, without_optimizer, folder)[0] == (
        True,
        "this Policy has no optimizer: create it with one",
    )
