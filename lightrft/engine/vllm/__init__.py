"""vLLM inside this process: one engine per rank, or one per `engine_tp_size` consecutive ranks, next to the trainer.

adapter.py is the engine as trainers know it, arguments.py what it is started with, shim.py everything of vLLM that is not its
documented offline interface, layers.py what it loads and computes otherwise here.
"""

import logging
import os
from collections.abc import Callable

import torch

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several ranks share the cores
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Defaults, read by vLLM at its import; what the user has set stays."""
EXPECTED = {
    "vllm.engine.arg_utils": (
        "The global random seed is set to",  # the process's generators are kept
        "This model does not officially support disabling chunked prefill",  # see arguments.py; its scheduler does
    ),
    "vllm.renderers.base": ("Using None for EOS token id", "Chat template warmup failed"),  # it gets token ids, and end tokens
    "vllm.model_executor.model_loader.reload.layerwise": ("RotaryEmbedding: Failed to load weights",),  # which has none
}
"""Logger -> beginnings of its warnings that speak of choices made here; the others are shown."""
EXPECTED_ON_CPU = {
    "vllm.config.vllm": ("Enforce eager set", "Inductor compilation was disabled", "Model Runner V2 requires Triton"),
    "vllm.platforms.cpu": ("Triton is not installed",),
    "vllm.v1.worker.cpu_worker": ("libtcmalloc is not found", "libiomp is not found", "CPU backend doesn't allow to use"),
}
"""The same where nothing is compiled."""


def _without(beginnings: tuple[str, ...]) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not record.getMessage().startswith(beginnings)


if "VLLM_LOGGING_LEVEL" not in os.environ:
    logging.getLogger("vllm").setLevel(logging.ERROR)  # while it is imported; its engine sets the level when it starts
    for name, beginnings in (EXPECTED if torch.accelerator.is_available() else EXPECTED | EXPECTED_ON_CPU).items():
        logging.getLogger(name).addFilter(_without(beginnings))
for variable, default in ENVIRONMENT.items():
    os.environ.setdefault(variable, default)

from lightrft.engine.vllm.adapter import VLLMEngine  # noqa: E402  after its environment

__all__ = ["VLLMEngine"]
