"""NF4 with double quantisation, computed by bitsandbytes on a CPU or an accelerator."""

import logging

import torch
from torch import Tensor

# On a CPU it says that an optional kernel for inference is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

from bitsandbytes.functional import (  # noqa: E402
    QuantState,
    dequantize_4bit,
    quantize_4bit,
)

from lightrft.models.four_bits import BLOCK, SCALES  # noqa: E402

NF4 = "nf4"


def quantize(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix [out, in], whose `in` is a multiple of BLOCK.

    Return the codes [out, in / 2] uint8, the scales [out, in / BLOCK] uint8, and what the scales
    stand for, as the bytes of float32: the SCALES values that a scale can have, a factor for every
    SCALES scales, and the mean that was subtracted.
    """
    codes, state = quantize_4bit(
        matrix.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type=NF4
    )
    numbers = torch.cat([state.state2.code, state.state2.absmax, state.offset[None]])
    rows = len(matrix)
    return codes.view(rows, -1), state.absmax.view(rows, -1), numbers.view(torch.uint8)


def dequantize(codes: Tensor, scales: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix [out, in] that the results of quantize() stand for."""
    values, factors, mean = numbers.view(torch.float32).tensor_split([SCALES, -1])
    of_scales = QuantState(factors, code=values, blocksize=SCALES, dtype=torch.float32)
    state = QuantState(
        scales.reshape(-1),
        shape=torch.Size([len(codes), 2 * codes.shape[1]]),
        blocksize=BLOCK,
        quant_type=NF4,
        dtype=dtype,
        offset=mean,
        state2=of_scales,
    )
    return dequantize_4bit(codes.reshape(-1, 1), state)
