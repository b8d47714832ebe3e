"""Random models of every supported family, small enough for a test.

They are in folders as a user would have them.
"""

from functools import partial
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tiny import BOS, EOS, PAD, byte_tokenizer

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}
ROUTED_IN_GROUPS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
OTHERS = {
    "arcee": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 4},
    "exaone4": {"sliding_window": 4},
    "gemma2": {
        "sliding_window": 4,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0,
    },
    "glm4": {"attention_bias": True},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": {"logits_scaling": 4.0},
    "hunyuan_v1_dense": {},
    "ministral3": {},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "olmo3": {"sliding_window": 4},
    "phi3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {},
}
"""Families whose blocks have the same names and shapes, or experts, with settings of their own."""
MIXTURES = {
    "deepseek_v3": ROUTED_IN_GROUPS
    | {
        "n_group": 2,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "glm4_moe": ROUTED_IN_GROUPS | {"n_group": 1, "topk_group": 1},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_moe_text": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
"""Families whose blocks are not split; ranks may divide the experts."""


def family_config(
    family: str,
    *,
    tie: bool,
    vocabulary: int,
    heads: int = 4,
    kv_heads: int = 2,
    pad: int = PAD,
    **options: bool,
) -> PretrainedConfig:
    special = {
        "gemma3": {"query_pre_attn_scalar": 16, "sliding_window": 4, "sliding_window_pattern": 2}
    }
    make = FAMILIES[family][0] if family in FAMILIES else partial(AutoConfig.for_model, family)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "intermediate_size": 48,
    }
    return make(
        vocab_size=vocabulary,
        initializer_range=0.1,
        max_position_embeddings=128,
        tie_word_embeddings=tie,
        pad_token_id=pad,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype=torch.float32,
        **sizes | (special | OTHERS | MIXTURES).get(family, {}),
        **options,
    )


def family_model(
    folder: Path | str, family: str, *, tie: bool = False, vocabulary: int = 261, **options: int
) -> str:
    """Write model and tokenizer; return the folder.

    Norms and biases are random too, so that their gradients matter.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            family_config(family, tie=tie, vocabulary=vocabulary, **options)
        )
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.data.add_(torch.randn_like(parameter) * 0.2)

    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)
