"""Import vLLM once, in the process that forks ranks.

Each rank would take eight seconds to import it anew. If its cache is empty, vLLM inspects the class
of each model in an interpreter of its own, which takes ten seconds. A fork does it itself.
"""

from contextlib import suppress
from functools import cache
from importlib import import_module

import torch

MODELS = "qwen2", "qwen3", "qwen3_moe", "mixtral"
WHEN_IT_STARTS = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.utils.cpu_triton_utils",
    "vllm.triton_utils.dispatcher",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.pool.flash_maxsim.flash_maxsim_rerank",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
)
"""Modules that an engine imports on a CPU.

On an accelerator the engine does that itself, because some of them may use the device.
"""


def import_vllm() -> None:
    """Import the adapter, and what vLLM imports when an engine starts."""
    import_module("lightrft.engine.vllm")
    import_module("compressed_tensors")
    for name in MODELS:
        import_module(f"vllm.model_executor.models.{name}")
    if not torch.accelerator.is_available():
        for name in WHEN_IT_STARTS:
            with suppress(ModuleNotFoundError):  # another version has other modules
                import_module(name)
        registry = import_module("vllm.model_executor.models.registry")
        # a class without a cached description, apart because of CUDA
        registry._run_in_subprocess = lambda inspect: inspect()


@cache
def load_vllm() -> None:
    """Import vLLM, and replace its kernels as an engine's start would."""
    import_vllm()
    if not torch.accelerator.is_available():
        from vllm.platforms import current_platform

        # looks at every name of every module, for half of an engine's start
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda platform: None)
