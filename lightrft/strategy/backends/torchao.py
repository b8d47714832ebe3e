"""Train the layers of the blocks with products of FP8, from torchao.

Each product has its factors rounded to e4m3 with a scale for each row or column. Weights, gradients
and the optimizer keep their precision, so that checkpoints and weight streams are the same. On a GPU
each layer is compiled by itself: as separate kernels the roundings can take longer than FP8 saves.
"""

from dataclasses import replace
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import nn

from lightrft.config.errors import ConfigError
from lightrft.models.load import repeated_blocks
from lightrft.models.parallel.device import compute_capability

MULTIPLE = 16
"""Both sizes of a weight are divisible by this, or kernels of FP8 cannot multiply with it."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Layers that choose experts; a small error there chooses others."""


def use_float8(module: nn.Module, device: torch.device) -> list[str]:
    """Give the linear layers of all blocks products of FP8; return the names of the layers.

    The parameters stay the same objects. A CPU emulates the products. Raises ConfigError for a GPU
    without them, and for a model with no such layer.
    """
    if device.type == "cuda" and compute_capability() < (9, 0):
        raise ConfigError(
            "--fp8_training needs a GPU of compute capability 9.0 (Hopper) or later: earlier ones"
            " have no products of FP8 with a scale for each row"
        )

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name("rowwise"),
        emulate=device.type == "cpu",
        # The number of tokens of a micro-batch, the inner size of weight gradients, is arbitrary.
        pad_inner_dim=True,
    )
    converted: list[str] = []

    def is_chosen(layer: nn.Module, name: str) -> bool:
        chosen = (
            layer.in_features % MULTIPLE == 0
            and layer.out_features % MULTIPLE == 0
            and name.rpartition(".")[2] not in ROUTERS
        )
        converted.extend([name] if chosen else [])
        return chosen

    for block in repeated_blocks(module):  # not embeddings and heads
        convert_to_float8_training(block, module_filter_fn=is_chosen, config=config)
        if device.type == "cuda":
            compile_layers(block)
    if not converted:
        raise ConfigError(
            "--fp8_training: no block of the model has a linear layer whose sizes are divisible by"
            f" {MULTIPLE}"
        )
    return converted


def compile_layers(block: nn.Module, **options: Any) -> None:
    """Compile each layer of FP8 by itself; hooks of FSDP2 are around the block, and stay outside.

    All layers have the same code, which is compiled once for each shape, with and without
    gradients. torch would stop after eight times.
    """
    dynamo.config.recompile_limit = 64
    for layer in block.modules():
        if type(layer).__name__ == "Float8Linear":
            layer.compile(dynamic=True, **options)
