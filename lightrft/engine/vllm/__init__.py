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

from lightrft.config.tables import table

ENVIRONMENT: dict[str, str] = table("engine/vllm/environment")
"""Defaults of environment variables that vLLM reads at import. What the user has set is kept."""


def _without(beginnings: tuple[str, ...]) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not record.getMessage().startswith(beginnings)


for variable, default in ENVIRONMENT.items():
    os.environ.setdefault(variable, default)
# A user who asks vLLM for more gets everything.
if os.environ["VLLM_LOGGING_LEVEL"] == ENVIRONMENT["VLLM_LOGGING_LEVEL"]:
    # This is for the import; the engine sets the level at its start.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    expected = table("engine/vllm/expected_warnings")
    for place in ("anywhere",) if torch.accelerator.is_available() else ("anywhere", "cpu"):
        for name, beginnings in expected[place].items():
            logging.getLogger(name).addFilter(_without(tuple(beginnings)))

from lightrft.engine.vllm.adapter import VLLMEngine  # noqa: E402  after its environment

__all__ = ["VLLMEngine"]
