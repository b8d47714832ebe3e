"""The reference of a policy with adapters is its actor without them.

It gives what a second model would give, and leaves no trace.
"""

import pytest
import torch
from torch.testing import assert_close

from algorithms.roles.rows import TEMPERATURE, share, whole
from lightrft.algorithms.objectives import sft
from lightrft.algorithms.roles.policy import Policy
from lightrft.config import ModelSection
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.models.lora import freeze_parameters
from lightrft.strategy import get_strategy
from ranks import run_ranks

LAYOUTS = {
    "fsdp": (2, {"fsdp": True}),
    "fsdp bf16": (2, {"fsdp": True, "bf16": True}),
    "zero3": (2, {"zero_stage": 3}),
    "zero2 bf16": (2, {"zero_stage": 2, "bf16": True}),
}


def policy_of_adapters(folder: str, args: dict) -> dict:
    made = get_strategy({"seed": 1, "pretrain": folder, **args})
    made.setup_distributed()
    section = ModelSection(pretrain=folder, lora_rank=4, lora_dropout=0.2)
    with made.init_model_context():
        actor = Actor(freeze_parameters(load_model(section), section))
    optimizer = made.create_optimizer(actor, 1e-2)
    trained = made.prepare((actor, optimizer, made.create_scheduler(optimizer, "constant", 0, 9)))
    reference = made.prepare(Actor(load_model(section)).requires_grad_(False))
    alone, pair = (
        Policy(made, *trained, reference=one, temperature=TEMPERATURE) for one in (actor, reference)
    )
    batch = share(whole(), made.mesh.data.rank, made.mesh.data.size)
    begun = alone.get_logprobs(batch)["logprobs"]
    alone.train(batch, sft)
    learned = alone.get_logprobs(batch)["logprobs"]

    found, expected = (
        policy.get_reference_logprobs(batch)["reference_logprobs"] for policy in (alone, pair)
    )
    again = alone.get_logprobs(batch)["logprobs"]
    norm = alone.train(batch, sft)["grad_norm"]
    info = alone.prepare_refit_info()
    streamed = {name: (tensor.shape, tensor.dtype) for name, tensor in alone.stream_weights()}
    changed = dict(alone.stream_weights())["model.layers.1.mlp.up_proj.weight"].clone()
    base = dict(made.full_params(reference))["model.layers.1.mlp.up_proj.weight"].clone()
    made.close()

    return {
        "begun": begun,
        "learned": learned,
        "found": found,
        "expected": expected,
        "again": again,
        "norm": norm,
        "info": (info, streamed),
        "weights": (changed, base),
    }


@pytest.fixture(
    scope="module",
    params=["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[1:])],
)
def outcome(request, folder):
    world_size, args = LAYOUTS[request.param]
    return run_ranks(world_size, policy_of_adapters, folder, args)


def test_the_reference_is_the_actor_without_adapters(outcome):
    for rank in outcome:
        assert_close(rank["found"], rank["expected"], rtol=0, atol=1e-6)
        assert (rank["learned"] - rank["begun"]).abs().max() > 1e-2
        assert torch.equal(rank["begun"], rank["expected"])


def test_an_actor_without_adapters_is_no_reference_of_its_own(folder):
    made = get_strategy({"fsdp": True})
    actor = Actor(load_model(ModelSection(pretrain=folder)))
    with pytest.raises(ValueError, match="without adapters"):
        Policy(made, actor, reference=actor)


def test_asking_it_leaves_no_trace(outcome):
    for rank in outcome:
        assert torch.equal(rank["again"], rank["learned"])
        assert (rank["norm"] > 0).all()


def test_refit_info_is_what_the_merged_stream_brings(outcome):
    for rank in outcome:
        info, streamed = rank["info"]
        assert list(info.items()) == list(streamed.items())
        assert not torch.equal(*rank["weights"])
