"""Small models of every family, a flat batch, and the results for each sequence alone."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightrft.core.batch import Batch
from lightrft.models.attention.recurrent import install, lift_time_step_limits

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "mistral window": ("mistral", {"sliding_window": 3, "head_dim": 8}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3 untied": (
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "cohere": ("cohere", {"logit_scale": 0.25, "use_qk_norm": False}),
    "granite": (
        "granite",
        {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    ),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": (
        "qwen3_moe",
        {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    )
}
"""Mixtures of experts, apart from MODELS: the last bit of a token may choose other experts."""
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA | EXPERTS),
    "qwen3_next": ("qwen3_next", DELTA | EXPERTS),
    "olmo_hybrid": ("olmo_hybrid", DELTA),
    "kimi_linear": (
        "kimi_linear",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 16,
            "kv_lora_rank": 8,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": ("lfm2_moe", EXPERTS | {"layer_types": ["conv", "full_attention"]}),
    "bamba": ("bamba", MAMBA | {"attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "granitemoehybrid",
        MAMBA
        | {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
            "logits_scaling": 4.0,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        MAMBA | {"mamba_d_ssm": 64, "head_dim": 8, "lm_head_multiplier": 0.3},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*",
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "head_dim": 8,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "mamba_d_state": 8,
            "mamba_expand": 2,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": 8,
            "layers_block_type": ["linear_attention", "hybrid"],
        },
    ),
}
"""Models with linear attention, a state space or convolutions in some layers."""
LENGTHS = [5, 1, 11, 8, 2, 9, 1, 16]
TEMPERATURE = 0.8
SEEN = 777
"""The token of images, in tests of attention alone."""


def make_model(name: str, attention: str, **sizes: Any) -> PreTrainedModel:
    kind, extra = (MODELS | MIXTURES | HYBRIDS)[name]
    config = AutoConfig.for_model(kind, **(SIZES | {"tie_word_embeddings": False} | extra | sizes))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )

    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, so that an error there shows
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)

    if attention != "eager":
        install(model)
    lift_time_step_limits(model)
    return model


def make_batch(lengths: list[int] = LENGTHS, alike: int = 0) -> Batch:
    """Return a batch of sequences that begin alike.

    All sequences begin with the same `alike` tokens, and every second one with as many more.
    """
    generator = torch.Generator().manual_seed(5)
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.7
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    mask[starts] = False

    rows = torch.randint(3, 61, (total,), generator=generator).split(lengths)
    for place, row in enumerate(rows):
        same = alike * (1 + place % 2)
        row[:same] = torch.arange(3, 3 + same)[: len(row)]

    return Batch(
        lengths=torch.tensor(lengths),
        input_ids=torch.cat(rows),
        loss_mask=mask,
        rows=torch.arange(len(lengths)),
    )


def one_by_one(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropy of learned tokens from the model's own logits, 0 elsewhere.

    Each sequence is computed alone.
    """
    logprobs = []
    entropies = []
    for ids in batch.input_ids.split(batch.lengths.tolist()):
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / TEMPERATURE
        logp = logits.log_softmax(-1)[:-1]
        logprobs.append(torch.cat([torch.zeros(1), logp.gather(-1, ids[1:, None])[:, 0]]))
        entropies.append(torch.cat([torch.zeros(1), -(logp.exp() * logp).sum(-1)]))
    return tuple(
        torch.where(batch.loss_mask, torch.cat(values), 0.0) for values in (logprobs, entropies)
    )


def weighted(values: tuple[Tensor, Tensor]) -> Tensor:
    """Return a loss that gives every token, and both results, another weight."""
    logprobs, entropy = values
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum() + 0.3 * (
        entropy * torch.linspace(1, -2, len(entropy))
    ).sum()


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert actual[name] is not None, f"no gradient for {name}"
        difference = (actual[name] - gradient).norm().item()
        assert difference <= 1e-4 * gradient.norm().item() + 1e-7, (
            f"{name}: off by {difference} of {gradient.norm().item()}"
        )


def masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids: Tensor,
    window: int | None,
    scaling: float | None = None,
) -> Tensor:
    """Compute attention of a sequence [T, H, D] with a mask.

    Runs of SEEN attend to all of their run, within a window before each token.
    """
    numbers = torch.cumsum((ids == SEEN).diff(prepend=torch.zeros(1)) != 0, 0)
    together = (ids == SEEN) & (numbers[:, None] == numbers)
    distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
    mask = ((distance >= 0) | together) & (distance < (window or len(ids)))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scaling or query.shape[-1] ** -0.5)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value)
