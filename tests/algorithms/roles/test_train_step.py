"""The split form of a train step: begin, micro-batches, finish or abort."""

import pytest
import torch

from algorithms.roles import rows
from lightrft.algorithms.objectives import sft
from lightrft.algorithms.roles.policy import Policy
from lightrft.core.batch import micro_batches
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm
from ranks import run_cases, run_ranks, whole


def start(folder: str, **args) -> tuple[Policy, rows.Padded]:
    made = rows.strategy(**args)
    return rows.policy(made, folder), rows.share(rows.whole(), made.get_rank(), made.mesh.data.size)


def state(policy: Policy):
    moments = [whole(value["momentum_buffer"]) for value in policy.optimizer.state.values()]
    parameters = [tensor.clone() for _, tensor in policy.strategy.full_params(policy.actor)]
    return parameters, moments, policy.scheduler.last_epoch


def by_hand(policy: Policy, batch: rows.Padded, *, stop_after: int | None = None):
    """Take one step over all rows in micro-batches of one row, or only the first of them."""
    flat, (members,) = policy.redistribute(batch, mbs=1)
    policy.begin_train_step(sft, policy.denominator(flat, members), len(members))
    for number, micro_batch in enumerate(micro_batches(flat, members, policy.strategy.to_device)):
        if number == stop_after:
            return None
        policy.train_microbatch(micro_batch)
    return policy.finish_train_step()


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


def raising(logprobs, batch, denominator):
    raise KeyError("a column")


def with_aborts(folder: str, aborts: bool, args: dict):
    policy, batch = start(folder, **args)
    by_hand(policy, batch)
    if aborts:
        before = state(policy)
        for stop_after in (0, 1, 3):
            assert by_hand(policy, batch, stop_after=stop_after) is None
            policy.abort_train_step()
        with pytest.raises(KeyError, match="a column"):
            policy.train(batch, raising)
        policy.abort_train_step()
        assert all(parameter.grad is None for parameter in policy.actor.parameters())
        torch.testing.assert_close(state(policy), before, rtol=0, atol=0)

    numbers = by_hand(policy, batch)
    return torch.stack(numbers), state(policy)


@pytest.mark.parametrize(
    ("world_size", "args"),
    [
        (1, {"gradient_checkpointing": True}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(2, {"bf16": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_aborted_step_leaves_nothing_behind(folder, world_size, args):
    results = run_cases(
        world_size, with_aborts, {aborts: (folder, aborts, args) for aborts in (False, True)}
    )
    torch.testing.assert_close(results[True], results[False], rtol=0, atol=0)


def out_of_order(folder: str):
    policy, batch = start(folder)
    flat, (members,) = policy.redistribute(batch, mbs=5)
    denominator = policy.denominator(flat, members)
    ready = list(micro_batches(flat, members, policy.strategy.to_device))

    def opened():
        policy.begin_train_step(sft, denominator, len(ready))

    errors = []

    def refused(verb, *arguments):
        with pytest.raises(RuntimeError) as caught:
            verb(*arguments)
        errors.append(str(caught.value))

    refused(policy.finish_train_step)
    refused(policy.abort_train_step)
    refused(policy.train_microbatch, ready[0])
    opened()
    refused(opened)
    refused(policy.finish_training)
    policy.train_microbatch(ready[0])
    refused(policy.finish_train_step)
    policy.train_microbatch(ready[1])
    refused(policy.train_microbatch, ready[1])
    policy.finish_train_step()

    return errors


def test_verbs_out_of_order(folder):
    none = "no train step is open: call begin_train_step() first"
    still_open = "a train step is open: call finish_train_step() or abort_train_step() first"
    assert run_ranks(1, out_of_order, folder)[0] == [
        none,
        none,
        none,
        still_open,
        still_open,
        "finish_train_step() after 1 of 2 micro-batches",
        "the train step was begun with 2 micro-batches, but got another one",
    ]


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
        "this Policy has no optimizer: create it with one, or pass eval_mode=True",
    )
