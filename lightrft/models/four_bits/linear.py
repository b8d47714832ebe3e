"""Frozen linear layers in four bits, for adapters on a base that takes a quarter of the memory.

QLoRA: Dettmers et al. 2023, arXiv:2305.14314. A matrix is stored as NF4 codes, two in a byte. 64
elements of a row share a scale of 8 bits, and 256 scales share a float32 (double quantisation), so
an element takes 4.127 bits.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.config.errors import ConfigError
from lightrft.models.empty import real_parameters
from lightrft.models.four_bits import SCALE_BLOCK, SCALE_GROUP
from lightrft.models.parallel.collectives import with_gradient

Gather = Callable[[Iterable[tuple[str, Tensor]], torch.dtype], Iterator[tuple[str, Tensor]]]
"""Function that yields the full tensors of parameters, in a dtype."""


class QuantizedLinear(nn.Linear):
    """Linear layer that keeps its matrix in four bits, and computes with it in `dtype`.

    `weight` has the codes of each row of the matrix and then the scales of its blocks, in one
    tensor [out, in * 33 / 64] of bytes. Ranks shard and gather it by rows like any other parameter.
    """

    dtype: torch.dtype
    """The dtype of the run; the matrix is rounded to it, here and for the engine."""
    numbers: Tensor
    """What the scales stand for, as the bytes of float32, so that no cast of the model changes
    them. They take a hundredth of a bit per element, and every rank has all of them."""

    def pack(self, matrix: Tensor) -> Tensor:
        """Quantize the matrix [out, in] of this layer.

        Return the value of `weight`, of which a rank keeps its shard, and set `numbers`.
        """
        from lightrft.models.four_bits.bitsandbytes import quantize

        codes, scales, numbers = quantize(matrix)
        self.numbers.copy_(numbers)
        return torch.cat([codes, scales], dim=1)

    def matrix(self, packed: Tensor) -> Tensor:
        """Return the matrix [out, in] in `dtype` from the whole `weight`."""
        from lightrft.models.four_bits.bitsandbytes import dequantize

        codes, scales = packed.split(
            [self.in_features // 2, self.in_features // SCALE_BLOCK], dim=1
        )
        # Offloading to the host may leave buffers there.
        return dequantize(codes, scales, self.numbers.to(packed.device), self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.weight
        # The matrix is unpacked again for the gradient, so that it stays nowhere in between.
        return with_gradient(
            x.to(self.dtype),
            lambda x: F.linear(x, self.matrix(packed), self.bias),
            lambda grad: grad @ self.matrix(packed),
        )


def quantize_layers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keep the matrices of all linear layers of the decoder in four bits, frozen.

    Embeddings, norms and the head stay as they are. If the model is empty, matrices are quantized
    when they are loaded, one at a time. Raise ConfigError for layers that cannot be
    quantized.
    """
    import lightrft.models.four_bits.bitsandbytes  # noqa: F401

    decoder = model.get_decoder()
    for name, parameter in decoder.named_parameters():
        if parameter.ndim > 2:
            raise ConfigError(
                f"--load_in_4bit supports linear layers only, and {name} of"
                f" {type(model).__name__} has shape {tuple(parameter.shape)}"
            )

    with real_parameters():
        for name, layer in decoder.named_modules():
            if isinstance(layer, nn.Linear):
                if layer.in_features % SCALE_BLOCK:
                    raise ConfigError(
                        f"--load_in_4bit: {name} has {layer.in_features} inputs, which is not a"
                        f" multiple of {SCALE_BLOCK}"
                    )
                _quantize(layer, dtype)


def _quantize(layer: nn.Linear, dtype: torch.dtype) -> None:
    matrix = layer.weight.detach()
    num_scales = matrix.numel() // SCALE_BLOCK
    num_numbers = SCALE_GROUP + -(-num_scales // SCALE_GROUP) + 1
    layer.__class__ = QuantizedLinear
    layer.dtype = dtype
    layer.register_buffer(
        "numbers", torch.zeros(4 * num_numbers, dtype=torch.uint8), persistent=False
    )

    shape = (layer.out_features, layer.in_features // 2 + layer.in_features // SCALE_BLOCK)
    packed = torch.empty(shape, dtype=torch.uint8, device=matrix.device)
    layer.weight = nn.Parameter(
        packed if packed.is_meta else layer.pack(matrix), requires_grad=False
    )
    if layer.bias is not None:
        layer.bias.requires_grad_(False)


def matrix_shape(packed: torch.Size) -> torch.Size:
    """Return the shape of the matrix that a `weight` of such a shape stands for."""
    rows, columns = packed
    return torch.Size([rows, columns * 2 * SCALE_BLOCK // (SCALE_BLOCK + 2)])


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the layers in four bits, by the names of their weights without adapters."""
    return {
        f"{name}.weight".replace(".base_layer.", "."): layer
        for name, layer in model.named_modules()
        if isinstance(layer, QuantizedLinear)
    }


def dense_stream(
    model: nn.Module, parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype, gather: Gather
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full parameters of a transformers model in `dtype`, with dequantized matrices.

    Ranks gather the packed bytes, and matrices are dequantized one at a time.
    """
    layers = quantized_layers(model)
    for is_packed, group in groupby(parameters, lambda named: named[1].dtype == torch.uint8):
        if not is_packed:
            yield from gather(group, dtype)
            continue
        for name, packed in gather(group, torch.uint8):
            yield name, layers[name.replace(".base_layer.", ".")].matrix(packed).to(dtype)
