"""SGLang on the trainer's devices.

The first of `engine_tp_size` consecutive ranks owns the engine and all processes. adapter.py
implements the interface of engines, samples.py converts requests and results, shim.py reaches into
SGLang's engine, lifetime.py starts and ends the processes, and scheduler.py is our code inside of
them.
"""

import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read by SGLang at its import

from lightrft.engine.sglang.adapter import SGLangEngine  # noqa: E402  after its environment

__all__ = ["SGLangEngine"]
