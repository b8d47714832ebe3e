"""NF4 with double quantisation, computed by bitsandbytes on a CPU or an accelerator."""

import logging

import torch
from torch import Tensor

# On a CPU it says that an optional kernel for inference is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit, quantize_blockwise  # noqa: E402

from lightrft.models.four_bits import SCALE_BLOCK, SCALE_GROUP  # noqa: E402

NF4 = "nf4"
ELEMENTS = {"cpu": 2**18}
"""Type of a device -> elements that are quantized at once; the default is a whole matrix."""


def quantize(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix [out, in], whose `in` is a multiple of SCALE_BLOCK.

    Return the codes [out, in / 2] uint8, the scales [out, in / SCALE_BLOCK] uint8, and what the
    scales stand for, as the bytes of float32: the SCALE_GROUP values that a scale can have, a
    factor for every SCALE_GROUP scales, and the mean that was subtracted. The results are bit by bit those of
    quantize_4bit(compress_statistics=True) for the whole matrix, which on a CPU would take the
    memory of 16 matrices.
    """
    rows = max(1, ELEMENTS.get(matrix.device.type, matrix.numel()) // matrix.shape[1])
    pieces = [
        quantize_4bit(some.contiguous(), blocksize=SCALE_BLOCK, quant_type=NF4)
        for some in matrix.split(rows)
    ]
    codes = torch.cat([codes for codes, _ in pieces]).view(len(matrix), -1)
    largest = torch.cat([state.absmax for _, state in pieces])

    mean = largest.mean()
    scales, state = quantize_blockwise(largest - mean, blocksize=SCALE_GROUP)
    numbers = torch.cat([state.code, state.absmax, mean[None]])
    return codes, scales.view(len(matrix), -1), numbers.view(torch.uint8)


def dequantize(codes: Tensor, scales: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix [out, in] that the results of quantize() stand for."""
    values, factors, mean = numbers.view(torch.float32).tensor_split([SCALE_GROUP, -1])
    of_scales = QuantState(factors, code=values, blocksize=SCALE_GROUP, dtype=torch.float32)
    state = QuantState(
        scales.reshape(-1),
        shape=torch.Size([len(codes), 2 * codes.shape[1]]),
        blocksize=SCALE_BLOCK,
        quant_type=NF4,
        dtype=dtype,
        offset=mean,
        state2=of_scales,
    )
    return dequantize_4bit(codes.reshape(-1, 1), state)
