"""Activations that are computed again give the same gradients to the last bit.

Only what was promised is done twice.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from transformers import AutoModelForCausalLM, LlamaConfig

from flat_models import (
    HYBRIDS,
    MIXTURES,
    TEMPERATURE,
    gradients_of,
    make_batch,
    make_model,
    weighted,
)
from lightrft.models.attention.flat import ATTENTION
from lightrft.models.heads import Actor
from lightrft.models.parallel.recompute import recompute
from lightrft.strategy.batching.micro_batches import find_shared_prefixes
from memory import Storages

POLICIES = ["full", "selective", "offload"]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
SMALL = 1000
"""Bytes of what is no activation, such as states of random numbers."""
SDPA = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Operations(TorchDispatchMode):
    """While entered, counts every operation by name."""

    def __init__(self):
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[function.name()] += 1
        return function(*args, **(kwargs or {}))


def backward_pass(
    name: str, policy: str | None, alike: int
) -> tuple[Counter[str], dict[str, torch.Tensor]]:
    """Return what the backward pass does, and the gradients.

    There are 16 tokens in each of 4 sequences; `alike` of them are a shared prefix.
    """
    actor = Actor(make_model(name, ATTENTION)).train()
    if policy:
        recompute(actor, policy)
    batch = make_batch([16] * 4, alike)
    loss = weighted(
        actor(
            replace(batch, shared=find_shared_prefixes(batch.input_ids, batch.lengths)), TEMPERATURE
        )
    )
    with Operations() as operations:
        loss.backward()

    return operations.seen, gradients_of(actor)


def products(operations: Counter[str]) -> Counter[str]:
    """Keep the matrix products, found by their names: mm, addmm, bmm, grouped_mm ..."""
    return Counter({name: count for name, count in operations.items() if "mm" in name})


@pytest.mark.parametrize("alike", [0, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "experts"])
def test_what_is_computed_twice(name, alike):
    plain, expected = backward_pass(name, None, alike)
    found = {policy: backward_pass(name, policy, alike) for policy in POLICIES}
    for _, gradients in found.values():
        assert all(torch.equal(gradients[key], gradient) for key, gradient in expected.items())
    full, selective, offload = (operations for operations, _ in found.values())
    assert products(plain) < products(selective) == products(full) == products(offload)
    assert selective[SDPA] == plain[SDPA] == 0 and full[SDPA] == offload[SDPA] >= 1


EXPERTS = ["gpt_oss", *MIXTURES, *(name for name in HYBRIDS if "moe" in name)]
"""Mixtures of experts; those of gpt_oss have biases."""


@pytest.mark.parametrize("name", sorted({*EXPERTS, "qwen3_next", "kimi_linear"}))
def test_every_mixture_has_the_same_gradients(name: str) -> None:
    _, expected = backward_pass(name, None, 0)
    for policy in POLICIES:
        _, gradients = backward_pass(name, policy, 0)
        assert all(torch.equal(gradients[key], each) for key, each in expected.items()), policy


@pytest.mark.parametrize("policy", POLICIES)
def test_no_python_runs_between_the_operations_of_a_block(policy: str) -> None:
    """A mode of dispatch took 15 to 30 us for each of the 60 operations of a block, twice."""
    actor = Actor(make_model("llama", ATTENTION)).train()
    recompute(actor, policy)
    modes: list[int] = []
    for block in actor.hf_model.get_decoder().layers:
        for part in block.children():
            part.register_forward_hook(
                lambda *_: modes.append(len(_get_current_dispatch_mode_stack()))
            )
    weighted(actor(make_batch([16] * 4), TEMPERATURE)).backward()
    # The recomputation ends at the last norm's output, before the last product.
    num_layers = len(actor.hf_model.get_decoder().layers)
    assert modes == [0] * 7 * num_layers


def kept_bytes(policy: str | None, layers: int) -> int:
    """Return what the forward pass of a model of so many layers keeps for the backward pass."""
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**SHAPE, num_hidden_layers=layers), attn_implementation=ATTENTION
    )
    actor = Actor(model).train()
    if policy:
        recompute(actor, policy)
    batch = make_batch([16] * 4)
    with Storages(actor.parameters()) as storages:
        loss = weighted(actor(batch, TEMPERATURE))
    kept = storages.kept()
    loss.backward()
    return kept


def test_what_a_block_keeps() -> None:
    """Its input; with selective recomputation also queries, keys, values, results, and scales."""
    kept = {policy: kept_bytes(policy, 3) - kept_bytes(policy, 2) for policy in (None, *POLICIES)}
    hidden, heads = SHAPE["hidden_size"], SHAPE["num_attention_heads"]
    tokens = 4 * 16
    assert kept["full"] - 4 * tokens * hidden <= SMALL
    assert kept["offload"] - 4 * tokens * hidden <= SMALL, "on a CPU the copy takes as much"
    of_attention = 4 * tokens * (2 * hidden + 2 * hidden // 2 + heads)
    assert 0 <= kept["selective"] - kept["full"] - of_attention <= SMALL
    assert kept["selective"] < kept[None] / 2


def gradients_of_two_passes(policy: str | None) -> dict[str, torch.Tensor]:
    """Compute two batches, then the gradients of the first one twice and of the second one once."""
    actor = Actor(make_model("experts", ATTENTION)).train()
    if policy:
        recompute(actor, policy)
    first, second = (
        weighted(actor(make_batch(lengths), TEMPERATURE)) for lengths in ([16] * 4, [9, 5])
    )
    first.backward(retain_graph=True)
    second.backward()
    first.backward()
    return gradients_of(actor)


@pytest.mark.parametrize("policy", POLICIES)
def test_passes_may_overlap_and_repeat(policy: str) -> None:
    found, expected = gradients_of_two_passes(policy), gradients_of_two_passes(None)
    assert all(torch.equal(found[key], gradient) for key, gradient in expected.items())
