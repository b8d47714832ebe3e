"""vLLM inside this process, next to the trainer: one engine per `engine_tp_size` ranks.

adapter.py implements the interface of engines, arguments.py has the arguments of the start, shim.py
every access to vLLM beyond the documented offline interface, and loader.py replaces vLLM's loader
of empty models. On CPUs, on_cpu.py replaces what vLLM computes slowly. With --speculative,
text_drafter.py drafts, verification.py verifies, and speculation.py decides when.
"""

import logging
import os
from collections.abc import Callable

import torch

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several ranks share the cores
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # It samples no request with a seed, but vLLM would look for it, compile it and warn of it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Attention of float32 models; Triton would round factors to 10 bits (TensorFloat32).
    "TRITON_F32_DEFAULT": "ieee",
    "DO_NOT_TRACK": "1",
}
"""Defaults of environment variables that vLLM reads at import. What the user has set is kept."""
EXPECTED = {
    "vllm.engine.arg_utils": (
        "The global random seed is set to",  # the process's generators are restored
        # See arguments.py; vLLM's scheduler supports it.
        "This model does not officially support disabling chunked prefill",
    ),
    # See text_drafter.py.
    "vllm.config.speculative": ("Using a custom class-based proposer backend",),
    "vllm.config.vllm": (
        "Async scheduling not supported with custom_class",
        "max_num_scheduled_tokens is set to",
        "Model Runner V2 does not yet support speculative method 'custom_class'",
    ),
    # Banned tokens are bad words then.
    "vllm.v1.sample.logits_processor": ("min_p and logit_bias parameters won't work",),
    # It comes once for each kernel.
    "vllm.utils.jit_monitor": ("Triton kernel JIT compilation during inference",),
    # The renderer receives token ids and end tokens.
    "vllm.renderers.base": ("Using None for EOS token id", "Chat template warmup failed"),
}
"""Logger -> prefixes of warnings about choices made here. These are suppressed, others shown."""
EXPECTED_ON_CPU = {
    "vllm.config.vllm": (
        *EXPECTED["vllm.config.vllm"],
        "Enforce eager set",
        "Inductor compilation was disabled",
        "Model Runner V2 requires Triton",
    ),
    "vllm.platforms.cpu": ("Triton is not installed", "CPU MLA backend requires block_size=16"),
    # A second engine of a process finds the kernels of the first one.
    "vllm.triton_utils.dispatcher": ("Kernel vllm.",),
    # It counts files that the kernel keeps in memory and gives up for an allocation.
    "vllm.utils.cpu_resource_utils": ("Cgroup memory preflight",),
    "vllm.v1.worker.cpu_worker": (
        "libtcmalloc is not found",
        "libiomp is not found",
        "Speculative decoding on CPU without",
        "CPU backend doesn't allow to use",
    ),
}
"""Further suppressed warnings on CPUs, where nothing is compiled by default."""


def _without(beginnings: tuple[str, ...]) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not record.getMessage().startswith(beginnings)


for variable, default in ENVIRONMENT.items():
    os.environ.setdefault(variable, default)
# A user who asks vLLM for more gets everything.
if os.environ["VLLM_LOGGING_LEVEL"] == ENVIRONMENT["VLLM_LOGGING_LEVEL"]:
    # This is for the import; the engine sets the level at its start.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    for name, beginnings in (
        EXPECTED if torch.accelerator.is_available() else EXPECTED | EXPECTED_ON_CPU
    ).items():
        logging.getLogger(name).addFilter(_without(beginnings))

from lightrft.engine.vllm.adapter import VLLMEngine  # noqa: E402  after its environment

__all__ = ["VLLMEngine"]
