"""The arguments that vLLM's engine starts with."""

from dataclasses import fields
from typing import get_args

import torch
from transformers import PretrainedConfig
from vllm import envs
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import EngineArgs
from vllm.triton_utils import HAS_TRITON

from lightrft.config.tables import table
from lightrft.core.engine import MEDIA_NAMES
from lightrft.engine.base import EngineSetup
from lightrft.engine.model_info import has_recurrent_state
from lightrft.engine.start import with_users_arguments
from lightrft.models.parallel.device import compute_capability
from lightrft.models.qwen_omni import OmniThinkerConfig

TEXT_DRAFTER = "lightrft.engine.vllm.text_drafter.TextDrafter"
EXACT_MODEL = "LightrftExactForCausalLM"
"""Name of the model of --exact in vLLM's registry; its adapter registers it."""
RANKS = get_args(MaxLoRARanks)
"""Ranks of the slots for adapters that vLLM has kernels for."""
VLLM_RESERVED: dict[str, str] = table("engine/reserved_arguments")["vllm"]
"""Arguments that --engine_args may not set -> what to do instead."""


def arguments(setup: EngineSetup, config: PretrainedConfig, limits: dict[str, int]) -> dict:
    """Return the arguments of a model with at most `limits` items of each medium in a prompt."""
    section = setup.section
    on_cpu = setup.device.type == "cpu"
    sleeps = not on_cpu and section.enable_engine_sleep
    of_cpu = {
        "kv_cache_memory_bytes": int(section.engine_kv_cache_gb * 2**30),
        # On a CPU with AVX512-BF16, Mamba layers can only have a float32 state cache, and vLLM
        # would warn of that for every model.
        "mamba_ssm_cache_dtype": "float32",
        # Samples of a group share whole blocks of the prompt. 32 tokens are the least that vLLM's
        # kernel allows; the default is 128.
        "block_size": 32,
        # For a prompt in two chunks, V1 draws a token after the first and reverts the draw. A
        # seeded CPU generator cannot do that.
        "enable_chunked_prefill": False,
    }
    # MLA's CPU kernel mistakes heads for tokens.
    latent = on_cpu and getattr(config.get_text_config(), "kv_lora_rank", None)
    kernels = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}} if latent else {}
    # The trainer computes logits in float32 too. Rounded to bfloat16, a logit of 18 is wrong by up
    # to 0.06.
    head = {} if setup.dtype == torch.float32 else {"head_dtype": "float32"}
    # Whether a thinker's head is the embedding is read from the text model by vLLM, but from the
    # thinker by transformers.
    tied = {"text_config": {"tie_word_embeddings": config.tie_word_embeddings}}
    quantized = {}
    if section.rollout_quantization != "none":
        from lightrft.models.weight_sync.quantized import engine_config

        quantized = {"quantization_config": engine_config(section.rollout_quantization)}
    # On Blackwell vLLM would choose kernels that repack the weights of experts after every load.
    experts = {"moe_backend": "triton"} if compute_capability() >= (10, 0) else {}
    exact = {"architectures": [EXACT_MODEL]} if section.exact else {}
    thinker = {"thinker_config": tied} if isinstance(config, OmniThinkerConfig) else {}

    # Of some vision-language models (Qwen3.5) only the language model is trained; vLLM starts all of them.
    sees = bool(limits) or config.get_text_config() is not config
    media = {
        "limit_mm_per_prompt": {
            medium: limits.get(name, 0) for name, medium in MEDIA_NAMES.items()
        },
        "mm_processor_cache_gb": 0,  # the cache would only hold images of the last step
        # The constants of this are stored in the model and are not streamed.
        "mm_device_do_normalize": False,
    }
    options = (
        (of_cpu if on_cpu else {})
        | kernels
        | (media if sees else {})
        | _speculation(setup)
        | _adapters(setup)
        | experts
        | ({"enable_return_routed_experts": True} if section.router_replay else {})
        | {
            "model": setup.model_path,
            "trust_remote_code": setup.trust_remote_code,
            "dtype": str(setup.dtype).removeprefix("torch."),
            "hf_overrides": head | thinker | quantized | exact,
            "load_format": "dummy" if setup.from_stream else "auto",
            "max_model_len": setup.max_model_len,
            "tensor_parallel_size": setup.axis.size,
            "distributed_executor_backend": "external_launcher",
            "seed": setup.seed,
            "gpu_memory_utilization": 0.1 if on_cpu else section.engine_mem_util,
            "enforce_eager": on_cpu or section.engine_enforce_eager,
            "enable_sleep_mode": sleeps,
            # CUDA graphs of a sleeping engine are in host memory, 1 to 2 GB. NCCL's buffers stay on
            # the device (about 1 GB with 4 ranks): enable_nccl_comm_suspend is experimental in
            # vLLM, and nobody has shown that a captured graph is right after it.
            "sleep_mode_offload_cudagraph": sleeps,
            # A prefix of a model with recurrent states is found again only where a step ended, so
            # vLLM has to cut prompts into chunks for that.
            "enable_prefix_caching": not (on_cpu and has_recurrent_state(config)),
            "logprobs_mode": "processed_logprobs",  # at the sampling temperature
            "generation_config": "vllm",  # ignore the sampling defaults of the model's folder
            # Input and output are token ids, but media processors need a tokenizer.
            "skip_tokenizer_init": not sees,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
    )
    reserved = dict(VLLM_RESERVED)
    if on_cpu:  # the flag is about CUDA graphs; what is compiled for a CPU pays in long runs only
        del reserved["enforce_eager"]
    known = [field.name for field in fields(EngineArgs)]
    return with_users_arguments(options, section.engine_args, known=known, reserved=reserved)


def _adapters(setup: EngineSetup) -> dict:
    """Return the arguments of adapters beside the weights; none without them.

    vLLM adds slots to all layers that can have some, the head among them, unless it is told which.
    """
    adapters = setup.adapters
    if adapters is None:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": min(rank for rank in RANKS if rank >= adapters.rank),
        "max_loras": adapters.num_policies,
        "max_cpu_loras": adapters.num_policies,
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in adapters.layers}),
    }


def replay_problem(config: PretrainedConfig, *, on_cpu: bool) -> str:
    """Return why vLLM cannot say which experts it has chosen; empty if it can."""
    if not _on_v2():
        return "vLLM's runner V1, such as the one on a CPU without Triton, does not return experts"
    if on_cpu and has_recurrent_state(config):
        return "vLLM returns experts only with prefix caching, and recurrent states have none here"
    return ""


def mamba2_problem(config: PretrainedConfig) -> str:
    """Return why vLLM computes a model with Mamba 2 unlike transformers; empty if it does not."""
    match config.model_type:
        case "bamba":
            return "which has removed this family"
        case "granitemoehybrid" if config.mamba_n_groups > 1:
            return f"which normalizes each of its {config.mamba_n_groups} groups alone"
        case "falcon_h1" if config.mamba_rms_norm and config.mamba_norm_before_gate:
            return "which normalizes after the gate (mamba_norm_before_gate)"
        case "zamba2" if config.num_key_value_heads != config.num_attention_heads:
            return "which gives it as many key-value heads as attention heads"
        case "zamba2" if not config.tie_word_embeddings:
            return "which ties its embeddings"
    return ""


def _on_v2() -> bool:
    """Return True if vLLM uses model runner V2, which needs Triton."""
    forced = envs.VLLM_USE_V2_MODEL_RUNNER
    return HAS_TRITON if forced is None else forced


def _speculation(setup: EngineSetup) -> dict:
    """Return the arguments of --speculative; none without it."""
    section = setup.section
    # Runner V2 refuses our drafter. Unlike its method `ngram`, this one does not end asynchronous
    # scheduling.
    ours = {"method": "custom_class", "model": TEXT_DRAFTER}
    theirs = {"method": "ngram_gpu", "prompt_lookup_min": 3, "prompt_lookup_max": 5}
    kinds = {
        "ngram": theirs if _on_v2() else ours,
        "group": ours,
        "draft": {"method": "draft_model", "model": section.draft_pretrain},
        "eagle3": {"method": "eagle3", "model": section.draft_pretrain},
        "mtp": {"method": "mtp"},
    }
    if section.speculative == "none":
        return {}

    method = kinds[section.speculative]
    if method is not ours:
        # In runner V2, CUDA graphs are captured for each number of drafted tokens in this schedule.
        # It is replaced later.
        method["num_speculative_tokens_per_batch_size"] = [
            (1, 1, section.num_draft_tokens),
            (2, 2, 0),
        ]
        method["draft_tensor_parallel_size"] = setup.axis.size

    return {
        "speculative_config": method | {"num_speculative_tokens": section.num_draft_tokens},
        "per_request_spec_decode_metrics": "summary",
    }
