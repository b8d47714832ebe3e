"""Adapters alone in an engine: loads, what is generated, and what is noticed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.contract import PROMPTS, start
from lightrft.config import ModelSection
from lightrft.engine.base import Engine, Request, Sampling
from lightrft.models.lora import ADAPTER, B, adapter_shapes, freeze_parameters, is_adapter
from lightrft.models.lora import keep_adapters_apart, merge_adapters, split_adapters
from lightrft.parallel.device import current_device, select_device
from lightrft.parallel.mesh import Mesh
from lightrft.weight_sync.adapters import Adapters

SAMPLING = Sampling(n=2, max_tokens=12, seed=3)


def adapted(folder: str, dtype: torch.dtype = torch.float32, **section: Any) -> PreTrainedModel:
    """A model as a trainer has it: adapters in float32, the others in the dtype of the engine."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = {"lora_rank": 4, "lora_alpha": 12.0} | section
    freeze_parameters(model, ModelSection(pretrain=folder, **own))
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def trained(model: PreTrainedModel, seed: int, scale: float = 0.1) -> PreTrainedModel:
    """Give B other values, as a step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(B):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def stream(model: PreTrainedModel, dtype: torch.dtype, *, base: bool) -> Iterator:
    named = [
        (name, parameter.detach().to(dtype))
        for name, parameter in model.named_parameters()
        if base or is_adapter(name)
    ]
    return split_adapters(model, named)


def adapters_of(model: PreTrainedModel, num_policies: int = 1) -> Adapters:
    shapes = ((name, parameter.shape) for name, parameter in model.named_parameters())
    return Adapters(adapter_shapes(shapes), num_policies)
