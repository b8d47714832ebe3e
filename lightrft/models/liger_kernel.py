"""Fused kernels for norms, rotary embeddings and feed-forwards from the package liger-kernel.

Hsu et al., arXiv 2410.10989. The package patches the model and the transformers module of the
family, so later models of the family in this process use the kernels too. In float32, log-probs and
gradients differ from transformers by less than 1e-5.
"""

import os
from importlib.util import find_spec

import torch
from torch import nn
from transformers import PreTrainedModel

FAMILIES = ("llama", "qwen2", "qwen3")
"""Supported values of model_type; the package has one function for each."""


def fuse(module: nn.Module, device: torch.device) -> None:
    """Patch every transformers model inside `module`, before the parameters are distributed.

    Raise ValueError, with all reasons, for a model that the kernels do not support.
    """
    if not isinstance(module, PreTrainedModel):
        for child in module.children():
            fuse(child, device)
        return
    problems = model_problems(module, device)
    if problems:
        raise ValueError(
            f"--fused_kernels liger cannot be used for {type(module).__name__}:"
            f" {'; '.join(problems)}"
        )
    import liger_kernel.transformers as liger

    apply = getattr(liger, f"apply_liger_kernel_to_{module.config.model_type}")
    # The trainer has fused log-probs of its own, so the package's losses stay off.
    apply(
        rope=True,
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
        model=module,
    )


def model_problems(model: PreTrainedModel, device: torch.device) -> list[str]:
    """Return all reasons why the kernels cannot compute this model on this device."""
    problems = []
    config = model.config
    if config.model_type not in FAMILIES:
        problems.append(f"its family {config.model_type!r} is not one of {', '.join(FAMILIES)}")
    elif config.hidden_act not in ("silu", "swish"):
        problems.append(f"its activation is {config.hidden_act}, not silu")

    if find_spec("liger_kernel") is None:
        problems.append("the package is not installed (pip install liger-kernel)")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        problems.append("the kernels need an accelerator")
    return problems
