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

from lightrft.config.tables import table
from lightrft.models.outermost import outermost

LIGER_FAMILIES: dict[str, str] = table("models/families")["liger"]
"""Supported values of model_type, with the kernel of the feed-forward layers.

The package has one function for each family.
"""
ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}


def fuse(module: nn.Module, device: torch.device) -> None:
    """Patch every transformers model inside `module`, before the parameters are distributed.

    Raise ValueError, with all reasons, for a model that the kernels do not support.
    """
    for model in outermost(module, PreTrainedModel):
        problems = model_problems(model, device)
        if problems:
            raise ValueError(
                f"--fused_kernels liger cannot be used for {type(model).__name__}:"
                f" {'; '.join(problems)}"
            )

        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        family = model.config.model_type
        feed_forward = LIGER_FAMILIES[family]
        options = {feed_forward: True} if feed_forward else {"swiglu": False}
        # The trainer has fused log-probs of its own, so the package's losses stay off.
        options |= {"cross_entropy": False, "fused_linear_cross_entropy": False}
        MODEL_TYPE_TO_APPLY_LIGER_FN[family](rope=True, rms_norm=True, model=model, **options)


def model_problems(model: PreTrainedModel, device: torch.device) -> list[str]:
    """Return all reasons why the kernels cannot compute this model on this device."""
    problems = []
    config = model.config
    feed_forward = LIGER_FAMILIES.get(config.model_type)
    if feed_forward is None:
        problems.append(
            f"its family {config.model_type!r} is not one of {', '.join(sorted(LIGER_FAMILIES))}"
        )
    elif feed_forward:
        # Gemma's configuration has another name.
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        allowed = ACTIVATIONS[feed_forward]
        if activation not in allowed:
            problems.append(f"its activation is {activation}, not {allowed[0]}")

    if find_spec("liger_kernel") is None:
        problems.append("the package is not installed (pip install liger-kernel)")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        problems.append("the kernels need an accelerator")
    return problems
