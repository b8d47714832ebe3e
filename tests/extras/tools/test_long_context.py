"""The recipe for 131,072 tokens, rehearsed at its real sizes on tensors that have no memory.

Eight ranks share a sequence (Ulysses), blocks are recomputed, their inputs are in host memory, and
the head computes log-probs in chunks. Seven ranks and the device exist in name only.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightrft.config.command_line import parse
from lightrft.config.resolve import resolve
from lightrft.core.batch import Batch
from lightrft.extras.tools.planning import Planner
from lightrft.extras.tools.shapes import model_config
from lightrft.extras.tools.step_memory import with_layers
from lightrft.models.attention.flat import ATTENTION
from lightrft.models.heads import Actor
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.peaks import DEVICES
from lightrft.models.parallel.recompute import recompute
from lightrft.models.parallel.sequence_parallel import set_sequence_parallel
from lightrft.models.parallel.ulysses import Ulysses
from memory import Storages
from models.parallel.test_inputs_on_host import simulated
from ranks import fake_group

RECIPE = Path(__file__).parents[3] / "configs" / "grpo_128k_llama3.1_8b.yaml"
CONFIG = parse(["--config", str(RECIPE)], "train_ppo")
SHAPE = model_config(CONFIG.model.pretrain)
TOKENS = CONFIG.train.max_tokens_per_microbatch
SP = CONFIG.strategy.sp_size
OF_RANK = TOKENS // SP
INPUT = OF_RANK * SHAPE.hidden_size * 2
"""Bytes of the input of a block on a rank."""


class FlashAttention(torch.autograd.Function):
    """Keeps what a kernel of flash attention keeps, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = torch.empty_like(query)
        scales = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, scales)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


@cache
def rehearsal(policy: str, layers: int) -> tuple[int, int, int]:
    """Compute one micro-batch of the recipe forward and backward, with some of its layers.

    Return the bytes of the device behind the forward pass and at the peak, without parameters and
    their gradients, and the number of copies between host and device.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            with_layers(SHAPE, layers), attn_implementation=ATTENTION, dtype=torch.bfloat16
        )
    actor = Actor(model).train()
    recompute(actor, policy)
    for parameter in actor.parameters():
        # FSDP2 reduces gradients at once.
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    batch = Batch(
        lengths=torch.tensor([TOKENS]),
        input_ids=torch.zeros(TOKENS, dtype=torch.int64),
        loss_mask=torch.arange(TOKENS) > 0,
        rows=torch.tensor([0]),
    )
    with (
        fake_group(SP),
        simulated(1.0) as device,
        pytest.MonkeyPatch.context() as patch,
        Storages([*actor.parameters(), *actor.buffers()], device="meta") as storages,
    ):
        patch.setattr(
            F, "scaled_dot_product_attention", lambda *qkv, **_: FlashAttention.apply(*qkv)
        )
        assert set_sequence_parallel(actor, Ulysses(Axis("sp", SP, 0, dist.group.WORLD)), tp=1)
        logprobs, _ = actor(batch.to("meta"), CONFIG.rollout.temperature)
        kept = storages.kept()
        logprobs.sum().backward()
    return kept, storages.peak, len(device.copies)


def whole_model(policy: str) -> tuple[float, float]:
    """Return both figures of all layers: layers are equal, so they follow from four and five."""
    (kept, peak, _), (more_kept, more_peak, _) = (rehearsal(policy, layers) for layers in (4, 5))
    others = SHAPE.num_hidden_layers - 4
    return kept + others * (more_kept - kept), peak + others * (more_peak - peak)


def test_a_layer_keeps_nothing_on_the_device() -> None:
    """With the other policies it keeps its input, and what attention needs."""
    kept = {
        policy: rehearsal(policy, 5)[0] - rehearsal(policy, 4)[0]
        for policy in ("offload", "full", "selective")
    }
    heads = SHAPE.num_attention_heads
    of_attention = 2 * INPUT + 2 * INPUT * SHAPE.num_key_value_heads // heads + 4 * OF_RANK * heads
    assert kept["offload"] == 0
    assert kept["full"] == INPUT
    assert kept["selective"] == INPUT + of_attention


def test_each_input_leaves_once_and_returns_once() -> None:
    assert rehearsal("offload", 4)[2] == 4 + 3
    assert rehearsal("full", 4)[2] == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["offload", "full", "selective"])
def test_the_plan_has_the_bytes_of_the_rehearsal(policy: str) -> None:
    """The plan traces other code: FSDP2 with gathered layers, and attention without exchanges."""
    config = parse(
        ["--config", str(RECIPE), "--gradient_checkpointing_policy", policy], "train_ppo"
    )
    resolve(config, "train_ppo", world_size=8)
    planner = Planner(config, "train_ppo", 8, DEVICES["h100"], ranks_per_node=8, shape=SHAPE)
    step = planner.step(TOKENS)
    kept, peak = whole_model(policy)
    assert step.activations == pytest.approx(kept, rel=0.04)
    phase = planner.phases(step, TOKENS)["train"]
    assert peak < phase["activations"] + phase["head, gathered layers"] < peak + 6e9
    assert sum(phase.values()) < planner.capacity
