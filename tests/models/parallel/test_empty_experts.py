"""Why: torch's product of experts has wrong gradients on Blackwell for those without a token."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LongcatFlashConfig, PreTrainedModel
from transformers.integrations import moe

from lightrft.config import ModelSection
from lightrft.config.facts import EXPERT_FAMILIES
from lightrft.models import load
from lightrft.models.parallel.expert_parallel import expert_layers, occupy_experts
from models.parallel.families import family_model
from tiny import tiny_experts

TOKEN = torch.tensor([[3]])
"""It cannot choose all experts of a layer."""


class AsOnBlackwell(torch.autograd.Function):
    """Product of tokens [t, in] with the matrix of each one's expert [experts, in, out]."""

    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        ctx.ends = offs[:-1].tolist()
        ctx.save_for_backward(tokens, weight)
        products = zip(tokens.tensor_split(ctx.ends), weight, strict=True)
        return torch.cat([rows @ matrix for rows, matrix in products])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        tokens, weight = ctx.saved_tensors
        gradients, rows = gradient.tensor_split(ctx.ends), tokens.tensor_split(ctx.ends)
        of_tokens = [grad @ matrix.T for grad, matrix in zip(gradients, weight, strict=True)]
        of_weight = [
            rows_of_it.T @ grad if len(rows_of_it) else torch.full_like(matrix, 1e3)
            for grad, rows_of_it, matrix in zip(gradients, rows, weight, strict=True)
        ]
        return torch.cat(of_tokens), torch.stack(of_weight), None


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the gradients of a loss of one token, by name."""
    model(TOKEN, position_ids=torch.zeros_like(TOKEN)).logits.logsumexp(-1).sum().backward()
    return {
        name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_without_tokens_get_no_gradient(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family_model(tmp_path, family, kv_heads=4)

    def model(implementation: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(
            folder, experts_implementation=implementation, dtype=torch.float32
        ).train()

    expected = gradients(model("eager"))
    monkeypatch.setattr(moe, "_grouped_mm", AsOnBlackwell.apply)
    assert max(grad.abs().max() for grad in gradients(model("grouped_mm")).values()) > 100

    occupied = model("grouped_mm")
    occupy_experts(occupied)
    found = gradients(occupied)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_zeros_change_nothing_where_some_experts_have_no_weights() -> None:
    """LongCat's other experts return their tokens; its layer has no `num_experts`."""
    config = LongcatFlashConfig(
        vocab_size=16,
        hidden_size=32,
        num_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        head_dim=8,
        v_head_dim=8,
        ffn_hidden_size=48,
        n_routed_experts=5,
        zero_expert_num=2,
        moe_topk=2,
        expert_ffn_hidden_size=16,
    )
    model = AutoModelForCausalLM.from_config(config)
    expected = gradients(model)
    model.zero_grad()
    occupy_experts(model)
    found = gradients(model)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("capability", "occupies"), [((9, 0), False), ((10, 0), True)])
def test_models_are_loaded_so_on_blackwell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], occupies: bool
) -> None:
    monkeypatch.setattr(load, "compute_capability", lambda: capability)
    model = load.load_model(ModelSection(pretrain=tiny_experts(tmp_path)))
    layers = expert_layers(model)
    assert len(layers) == 2
    assert ["forward" in vars(layer) for layer in layers] == [occupies] * 2
