"""With this folder on PYTHONPATH every process can import SGLang in an environment laid over the
one with vLLM.
"""

import importlib.abc
import os
import sys
from typing import Any


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """torchvision's build in the package index is for CUDA: its compiled part does not load beside
    a CPU torch.

    The rest then fails, as it registers shapes for two operators that nobody has defined. They are
    defined here, in the moment of the import and without an implementation.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            kept.append(library)
            for operator in ("nms", "qnms"):
                library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


kept: list[Any] = []
"""A library's definitions last as long as the object."""
sys.meta_path.insert(0, _BeforeTorchvision())
if "WITH_VLLM" not in os.environ:
    sys.modules["vllm"] = None  # SGLang would take kernels from it
