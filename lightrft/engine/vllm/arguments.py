"""The arguments that vLLM's engine starts with."""

from transformers import PretrainedConfig

from lightrft.engine.base import EngineSetup
from lightrft.engine.requests import MEDIA
from lightrft.thinker import OmniThinkerConfig

TEXT = ("ngram", "group")
"""Values of --speculative that draft from text, without a model."""
TEXT_DRAFTER = "lightrft.engine.vllm.text_drafter.TextDrafter"


def arguments(setup: EngineSetup, config: PretrainedConfig, limits: dict[str, int]) -> dict:
    section = setup.section
    on_cpu = setup.device.type == "cpu"
    cache = {
        "kv_cache_memory_bytes": int(section.engine_kv_cache_gb * 2**30),
        # On a CPU with AVX512-BF16, Mamba layers can only have a float32 state cache, and vLLM
        # would warn of that for every model.
        "mamba_ssm_cache_dtype": "float32",
        # Samples of a group share whole blocks of the prompt. 32 tokens are the least that vLLM's
        # kernel allows; the default is 128.
        "block_size": 32,
    }
    memory = cache if on_cpu else {}
    # For a prompt in two chunks, V1 draws a token after the first and reverts the draw. A seeded
    # CPU generator cannot do that.
    prefill = {"enable_chunked_prefill": False} if on_cpu else {}
    # MLA's CPU kernel mistakes heads for tokens.
    latent = on_cpu and getattr(config.get_text_config(), "kv_lora_rank", None)
    kernels = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}} if latent else {}
    # Whether a thinker's head is the embedding is read from the text part by vLLM, but from the
    # thinker by transformers.
    tied = {"text_config": {"tie_word_embeddings": config.tie_word_embeddings}}
    head = (
        {"hf_overrides": {"thinker_config": tied}} if isinstance(config, OmniThinkerConfig) else {}
    )

    media = {
        "limit_mm_per_prompt": {medium: limits.get(name, 0) for name, medium in MEDIA.items()},
        "mm_processor_cache_gb": 0,  # the cache would only hold images of the last step
        # The constants of this are stored in the model and are not streamed.
        "mm_device_do_normalize": False,
    }
    return (
        memory
        | prefill
        | kernels
        | head
        | (media if limits else {})
        | _speculation(setup)
        | {
            "model": setup.model_path,
            "trust_remote_code": setup.trust_remote_code,
            "dtype": str(setup.dtype).removeprefix("torch."),
            "load_format": "dummy" if setup.from_stream else "auto",
            "max_model_len": setup.max_model_len,
            "tensor_parallel_size": setup.axis.size,
            "distributed_executor_backend": "external_launcher",
            "seed": setup.seed,
            "gpu_memory_utilization": 0.1 if on_cpu else section.engine_mem_util,
            "enforce_eager": on_cpu or section.engine_enforce_eager,
            "enable_sleep_mode": not on_cpu and section.enable_engine_sleep,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",  # at the sampling temperature
            "generation_config": "vllm",  # ignore the sampling defaults of the model's folder
            # Input and output are token ids, but media processors need a tokenizer.
            "skip_tokenizer_init": not limits,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
    )


def _speculation(setup: EngineSetup) -> dict:
    """Return the arguments of --speculative; none without it."""
    section = setup.section
    kinds = {
        "ngram": {"method": "custom_class", "model": TEXT_DRAFTER},
        "group": {"method": "custom_class", "model": TEXT_DRAFTER},
        "draft": {"method": "draft_model", "model": section.draft_pretrain},
        "eagle3": {"method": "eagle3", "model": section.draft_pretrain},
        "mtp": {"method": "mtp"},
    }
    if section.speculative == "none":
        return {}

    method = kinds[section.speculative]
    if section.speculative not in TEXT:
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
