"""vLLM inside this process: one engine per rank, or one per `engine_tp_size` consecutive ranks, next to the trainer.

adapter.py is the engine as trainers know it, arguments.py what it is started with, shim.py everything of vLLM that is not its
documented offline interface, layers.py what it loads and computes otherwise here.
"""

import logging
import os

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several ranks share the cores
    "VLLM_LOGGING_LEVEL": "ERROR",  # its start-up warnings speak of choices made here
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Defaults, read by vLLM at its import; what the user has set stays."""
for variable, default in ENVIRONMENT.items():
    os.environ.setdefault(variable, default)
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # its import speaks before it has read the level

from lightrft.engine.vllm.adapter import VLLMEngine  # noqa: E402  after its environment

__all__ = ["VLLMEngine"]
