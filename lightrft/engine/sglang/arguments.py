"""The arguments that SGLang's engine starts with."""

import inspect
from typing import Any

import torch
from sglang.srt.server_args import ServerArgs
from transformers import PretrainedConfig

from lightrft.config.errors import ConfigError
from lightrft.config.tables import table
from lightrft.engine.base import EngineSetup
from lightrft.engine.start import with_users_arguments
from lightrft.models.parallel.device import free_memory

SGLANG_RESERVED: dict[str, str] = table("engine/reserved_arguments")["sglang"]
"""Arguments that --engine_args may not set -> what to do instead."""
SPARE_TOKENS = 8
"""Tokens added to the context length, because SGLang rejects prompts within 6 tokens of it."""


def arguments(setup: EngineSetup, config: PretrainedConfig) -> dict[str, Any]:
    section = setup.section
    on_cpu = setup.device.type == "cpu"
    options = (_on_cpu(setup, config) if on_cpu else _on_accelerator(setup)) | {
        "model_path": setup.model_path,
        "trust_remote_code": setup.trust_remote_code,
        "dtype": str(setup.dtype).removeprefix("torch."),
        # The trainer computes logits in float32 too. Rounded to bfloat16, a logit of 18 is wrong by
        # up to 0.06.
        "enable_fp32_lm_head": setup.dtype != torch.float32,
        "load_format": "dummy" if setup.from_stream else "auto",
        "context_length": setup.max_model_len + SPARE_TOKENS,
        "tp_size": setup.axis.size,
        "random_seed": setup.seed,
        "device": setup.device.type,
        "log_level": "error",
        "sampling_backend": "pytorch",  # the only one that supports seeds
        "grammar_backend": "none",
        # Otherwise each process would keep a core busy while the trainer computes.
        "sleep_on_idle": True,
        "skip_tokenizer_init": True,  # input and output are token ids
        "enable_custom_logit_processor": True,
        "enable_weights_cpu_backup": section.engine_sleep_level == 1 and not on_cpu,
    }

    known = inspect.signature(ServerArgs).parameters
    return with_users_arguments(options, section.engine_args, known=known, reserved=SGLANG_RESERVED)


def _on_accelerator(setup: EngineSetup) -> dict[str, Any]:
    return {
        "base_gpu_id": setup.device.index,
        "mem_fraction_static": _share_of_free(setup),
        "disable_cuda_graph": setup.section.engine_enforce_eager,
        "enable_memory_saver": setup.section.enable_engine_sleep,
    }


def _share_of_free(setup: EngineSetup) -> float:
    """Return --engine_mem_util, a share of the accelerator, as a share of the free memory.

    SGLang applies the share to the free memory of the rank that has the least. It covers weights
    and cache; activations and graphs are extra.
    """
    share = setup.section.engine_mem_util
    free, total = free_memory(setup.device)
    free = min(setup.axis.gather(free))
    if share * total >= free:
        raise ConfigError(
            f"--engine_mem_util {share} of {total / 1e9:.1f} GB is more than the {free / 1e9:.1f}"
            " GB that are free on the accelerator; set a lower value, or end the other programs"
            " there"
        )
    return share * total / free


def _on_cpu(setup: EngineSetup, config: PretrainedConfig) -> dict[str, Any]:
    tokens = int(setup.section.engine_kv_cache_gb * 2**30) // _cache_bytes_of_a_token(
        config, setup.dtype, setup.axis.size
    )
    if tokens < setup.max_model_len + SPARE_TOKENS:
        raise ValueError(
            f"--engine_kv_cache_gb {setup.section.engine_kv_cache_gb} holds {tokens} tokens, less"
            f" than one sequence of {setup.max_model_len}: increase it"
        )

    return {
        "attention_backend": "torch_native",
        "mm_attention_backend": "sdpa",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "max_total_tokens": tokens,
        "mem_fraction_static": 0.8,
        "chunked_prefill_size": -1,
    }


def _cache_bytes_of_a_token(config: PretrainedConfig, dtype: torch.dtype, tp: int) -> int:
    """Return the bytes of one token's keys and values in all layers, on one of `tp` ranks."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * max(1, heads // tp) * head_dim * dtype.itemsize
