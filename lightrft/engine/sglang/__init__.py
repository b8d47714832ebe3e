"""SGLang beside the trainer: the first of `engine_tp_size` consecutive ranks owns the engine and its processes.

adapter.py is the engine as trainers know it, samples.py what is asked of SGLang for each request and what it answers, shim.py
SGLang's own engine, lifetime.py how its processes start and end, scheduler.py what they do of ours, inside.
"""

import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read by SGLang at its import

from lightrft.engine.sglang.adapter import SGLangEngine  # noqa: E402  after its environment

__all__ = ["SGLangEngine"]
