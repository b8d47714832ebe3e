"""Stands in for SGLang's kernel package, which has no build for a plain CPU: any name can be
imported, and only linear attention (mamba.py) can be called.

Dense models on a CPU without AMX compute with torch alone, and import a few names on the way. What
is called nevertheless is written to the file that STAND_IN_CALLS names, so that a test sees it, and
raises.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

OPERATORS = torch.library.Library("sgl_kernel", "DEF")
OPERATORS.define("fused_qk_gemma_rmsnorm_cpu() -> ()")  # Qwen-VL names it when it is imported

from sgl_kernel import mamba  # noqa: E402, F401  defines other operators


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*arguments: Any, **keywords: Any) -> Any:
        if "STAND_IN_CALLS" in os.environ:
            with open(os.environ["STAND_IN_CALLS"], "a") as file:
                file.write(f"{name}\n")
        raise NotImplementedError(
            f"sgl_kernel.{name}: no kernels here, this is the tests' stand-in"
        )

    return absent
