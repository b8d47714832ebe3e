"""Activations that are computed again give the same gradients to the last bit.

Only what was promised is done twice.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

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
from lightrft.models.recompute import keep_expensive, recompute
from lightrft.strategy.batching.micro_batches import find_shared_prefixes

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
        recompute(actor, selective=policy == "selective")
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
    full, gradients = backward_pass(name, "full", alike)
    selective, its_gradients = backward_pass(name, "selective", alike)
    for found in (gradients, its_gradients):
        assert all(torch.equal(found[key], gradient) for key, gradient in expected.items())
    norms = "aten::rsqrt"
    assert products(selective) == products(plain) < products(full)
    assert selective[SDPA] == plain[SDPA] == 0 and full[SDPA] >= 1
    assert plain[norms] == 0 and selective[norms] == full[norms] > 0, "norms are not kept"


EXPERTS = ["gpt_oss", *MIXTURES, *(name for name in HYBRIDS if "moe" in name)]
"""Mixtures of experts; those of gpt_oss have biases."""


@pytest.mark.parametrize("name", sorted({*EXPERTS, "qwen3_next", "kimi_linear"}))
def test_every_mixture_has_the_same_gradients(name: str) -> None:
    _, expected = backward_pass(name, None, 0)
    for policy in ("full", "selective"):
        _, gradients = backward_pass(name, policy, 0)
        assert all(torch.equal(gradients[key], each) for key, each in expected.items()), policy


def test_attention_with_dropout_draws_its_numbers_again():
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    qkv = [torch.zeros(1)] * 3
    assert keep_expensive(None, attention, *qkv, 0.0, True) is CheckpointPolicy.MUST_SAVE
    assert keep_expensive(None, attention, *qkv, 0.1, True) is CheckpointPolicy.PREFER_RECOMPUTE
    assert keep_expensive(None, attention, *qkv, dropout_p=0.1) is CheckpointPolicy.PREFER_RECOMPUTE
