"""Quantise weights on the way to an engine that computes in INT8 or FP8.

A row of a matrix is an output channel. It is sent as 8-bit codes with one scale in float32,
in the format of compressed-tensors, which vLLM reads. Embeddings, the head, norms and biases are
sent as they are. One matrix at a time exists in both forms.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.models.weight_sync.names import SCALE, NamedTensor, PublishedNames

HOST_BYTES = 4 * 2**20
DEVICE_BYTES = 128 * 2**20
"""Bytes of the rows in float32 that are quantised at a time.

On a host they stay in the cache. On an accelerator the launches of more kernels take longer.
"""
QUANTISED_LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Layers that are quantised: attention and a gated MLP."""


@dataclass(frozen=True, slots=True)
class Format:
    """An 8-bit format for the weights of an engine."""

    dtype: torch.dtype
    smallest: float
    largest: float
    kind: str
    """Name of the kind of number in compressed-tensors."""

    def quantize(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes [out, in] and scales [out, 1] of a matrix in float32.

        The arithmetic is the one of compressed-tensors, so that its results are equal bit by bit.
        """
        codes = torch.empty(matrix.shape, dtype=self.dtype, device=matrix.device)
        scales = torch.empty(len(matrix), 1, device=matrix.device)
        chunk = HOST_BYTES if matrix.device.type == "cpu" else DEVICE_BYTES
        step = max(1, chunk // (4 * matrix.shape[1]))
        chunks = (each.split(step) for each in (matrix.detach(), codes, scales))

        for rows, row_codes, row_scales in zip(*chunks, strict=True):
            rows = rows.float()
            largest = torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))
            torch.div(largest, (self.largest - self.smallest) / 2, out=row_scales)
            row_scales.masked_fill_(row_scales == 0, torch.finfo(torch.float32).eps)
            values = (rows / row_scales).clamp_(self.smallest, self.largest)
            row_codes.copy_(values if self.dtype.is_floating_point else values.round_())

        return codes, scales


FORMATS = {
    "int8": Format(torch.int8, -128, 127, "int"),
    "fp8": Format(torch.float8_e4m3fn, -448, 448, "float"),
}
"""--rollout_quantization -> format."""


class Quantization:
    """Tensors that a stream of one model brings to an INT8 or FP8 engine."""

    def __init__(self, name: str, names: PublishedNames, dtype: torch.dtype):
        """Take the format `name`; add the scales to `names`. Other weights are sent in `dtype`."""
        self.format = FORMATS[name]
        self.dtype = dtype
        self.parameters = frozenset(name for name, _ in names.model.named_parameters())
        # All ranks have them in the same order.
        self.matrices = dict.fromkeys(
            f"{name}.weight"
            for name, module in names.model.named_modules()
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in QUANTISED_LAYERS
        )
        for matrix in self.matrices:
            names.add(
                _scales_of(matrix), _scales_of(names.renamed[matrix]), (names.shapes[matrix][0], 1)
            )

    def of_stream(self, stream: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield the codes and the scales of the matrices, and other tensors in the engine's dtype.

        The stream brings matrices in float32, so that they are rounded only once.
        """
        for name, tensor in stream:
            if name in self.matrices:
                codes, scales = self.format.quantize(tensor)
                yield name, codes
                yield _scales_of(name), scales
                del codes
            elif name in self.parameters:
                yield name, tensor.to(self.dtype)
            else:
                yield name, tensor
            # Otherwise the next tensor would be gathered beside this one.
            del tensor


def engine_config(name: str) -> dict[str, Any]:
    """Return the configuration of compressed-tensors for an engine, for the format `name`."""
    kind = {"num_bits": 8, "type": FORMATS[name].kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{FORMATS[name].kind}-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "weights_and_inputs": {
                "targets": ["Linear"],
                "weights": {**kind, "strategy": "channel", "dynamic": False},
                "input_activations": {**kind, "strategy": "token", "dynamic": True},
            }
        },
    }


def quantization_problem(names: PublishedNames) -> str | None:
    """Return why the matrices of a model cannot be quantised, or None."""
    output = names.model.get_output_embeddings()
    others = [
        name
        for name, module in names.model.named_modules()
        if module is not output
        and not isinstance(module, nn.Embedding)
        and name.rpartition(".")[2] not in QUANTISED_LAYERS
        and any(weight.ndim > 1 for weight in module.parameters(recurse=False))
    ]
    if others:
        return f"only layers of attention and gated MLPs are quantised, and there is {others[0]}"
    return None


def _scales_of(name: str) -> str:
    return name.removesuffix(".weight") + SCALE
