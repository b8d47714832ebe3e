"""SGLang on the trainer's devices: the first of `engine_tp_size` consecutive ranks owns the engine
and its processes.

adapter.py implements the engine's interface, samples.py the conversion of requests and results,
shim.py the access to SGLang's engine, lifetime.py start and end of its processes, scheduler.py our
code inside of those processes.
"""

import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read by SGLang at its import

from lightrft.engine.sglang.adapter import SGLangEngine  # noqa: E402  after its environment

__all__ = ["SGLangEngine"]
