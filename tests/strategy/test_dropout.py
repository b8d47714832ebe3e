"""Why: the ranks of a group must draw the right dropout.

Equal dropout on all data ranks is noise that does not average out. Unequal dropout inside a tensor
or sequence group makes the ranks compute different models. Resumed runs must draw on, and
recomputed activations draw the same again.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.config import ModelSection
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from models.parallel.families import family_model
from models.parallel.test_tensor_parallel import batch_of, loss_of, sequences
from ranks import run_cases, run_ranks, whole
from strategy.test_checkpoint import Run
from strategy.training import strategy

SELECTIVE = {"gradient_checkpointing": True, "gradient_checkpointing_policy": "selective"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Attention drops out a third."""
    return with_dropout(family_model(tmp_path_factory.mktemp("model"), "qwen3", kv_heads=4))


def with_dropout(folder: str) -> str:
    config = json.loads(open(f"{folder}/config.json").read()) | {"attention_dropout": 0.3}
    with open(f"{folder}/config.json", "w") as file:
        json.dump(config, file)
    return folder


def drop_between_blocks(actor: Actor) -> None:
    for block in actor.language_model.get_decoder().layers:
        block.register_forward_hook(
            lambda module, _, output: F.dropout(output, 0.3, module.training)
        )


Passed = tuple[Tensor, dict[str, Tensor], Tensor, float]


def passed(folder: str, args: dict, blocks_only: bool = False) -> Passed:
    """Pass the same batch on all ranks.

    Return log-probs in training, gradients, log-probs in evaluation, and the next number drawn.
    """
    made = strategy(**args)
    actor = Actor(load_model(ModelSection(pretrain=folder)))
    if blocks_only:
        for block in actor.language_model.get_decoder().layers:
            block.self_attn.attention_dropout = 0.0

    drop_between_blocks(actor)
    actor = made.prepare(actor.train())
    logprobs, entropy = actor(batch_of(sequences()), 1.0)
    made.backward(loss_of(logprobs, entropy), actor)
    gradients = {name: whole(parameter.grad) for name, parameter in actor.hf_parameters()}
    with torch.no_grad():
        answer = actor.eval()(batch_of(sequences()), 1.0)[0]

    return logprobs.detach(), gradients, answer, torch.rand(1).item()


def same(results: list[Passed]) -> list[bool]:
    """Whether all ranks agree in training, in evaluation, and in what is drawn next."""
    first = results[0]
    return [
        all(torch.equal(other[index], first[index]) for other in results) for index in (0, 2)
    ] + [len({other[3] for other in results}) == 1]


LAYOUTS = {
    2: {
        "data": {},
        "replicas": {"dp_replicate": 2},
        "tp": {"tp_size": 2},
        "tp, sequence": {"tp_size": 2, "tp_sequence_parallel": True},
        "ulysses": {"sp_size": 2},
        "zigzag": {"cp_size": 2},
    },
    4: {"tp, zigzag": {"tp_size": 2, "cp_size": 2}},
}
"""By number of ranks; one start for each."""


@pytest.fixture(scope="module")
def results(folder) -> dict[str, list[Passed]]:
    found = {}
    for ranks, layouts in LAYOUTS.items():
        cases = {name: (folder, args) for name, args in layouts.items()}
        found |= run_cases(
            ranks,
            passed,
            cases | ({"blocks only": (folder, {"tp_size": 2}, True)} if ranks == 2 else {}),
        )
    return found


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data", "replicas"])
def test_data_ranks_draw_differently(results, layout):
    assert same(results[layout]) == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "tp, sequence", "ulysses", "zigzag", "tp, zigzag"])
def test_ranks_of_one_replica_draw_the_same(results, layout):
    found = results[layout]
    assert same(found) == [True, True, True]
    assert all(torch.equal(found[1][1][name], gradient) for name, gradient in found[0][1].items())


@pytest.mark.slow
def test_tensor_parallel_dropout_equals_that_of_one_process(folder, results):
    """Between blocks each rank has the whole stream, so a single process draws the same numbers."""
    logprobs, gradients, *_ = run_ranks(1, passed, folder, {}, True)[0]
    for found, its_gradients, *_ in results["blocks only"]:
        torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-5)
        for name, gradient in gradients.items():
            assert (its_gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def of_all_policies(folder: str) -> list[Passed]:
    return [passed(folder, args) for args in ({}, {"gradient_checkpointing": True}, SELECTIVE)]


def test_recomputed_activations_draw_the_same_again(folder):
    plain, *others = run_ranks(1, of_all_policies, folder)[0]
    for other in others:
        assert torch.equal(other[0], plain[0])
        assert all(torch.equal(other[1][name], gradient) for name, gradient in plain[1].items())


def resumed(folder: str, root) -> tuple[list, list]:
    """Metrics of steps 2 and 3, of a run in one go and of one that was resumed."""
    whole, first, second = (Run(folder, root / str(index)) for index in range(3))
    for run in (whole, first, second):
        run.model.train()
    whole.steps(0, 4)
    first.strategy.set_seed(1), first.steps(0, 2).save("step2")
    second.strategy.set_seed(5)
    second.root = first.root
    second.load()
    return whole.metrics[2:], second.steps(2, 4).metrics


def test_a_resumed_run_draws_on(folder, root):
    for first, second in run_ranks(2, resumed, folder, root):
        assert first == second
