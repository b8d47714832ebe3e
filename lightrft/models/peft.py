"""Linear layers with adapters that multiply with the same matrices as the engine."""

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn

from lightrft.models.four_bits.linear import QuantizedLinear
from lightrft.models.parallel.tensor_parallel import SplitAdapter
from lightrft.models.weight_sync.adapters import low_rank_product

MIXING = (0x7FEB352D, 0x846CA68B)
"""Odd factors that spread the bits of a counter (C. Wellons, "Hash prospector", 2018)."""


class AdaptedLinear(Linear):
    """Layer of peft that computes as the engine does where the frozen matrix is not float32.

    With --lora_sync merged an engine holds merge(W, A, B), rounded to the engine's dtype, and a
    trainer that computes W x + s B A x would learn from samples of another policy. So the trainer
    computes with the same rounded matrix, and gradients pass to A and B as if it were not rounded:
    the straight-through estimator of Bengio et al. 2013 (arXiv:1308.3432). With --lora_sync adapter
    both compute W x + (s B) A x, with A and s B rounded to the engine's dtype.
    """

    adapters_on = True
    """False while the layer computes the outputs of the frozen base layer."""
    is_merged = True
    """False if the engine holds the adapter beside the frozen matrix."""
    split: SplitAdapter | None = None
    """How tensor-parallel ranks divide the adapter; None: each has it whole."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        base = self.get_base_layer()
        if not self.adapters_on:
            return base(x, *args, **options)

        dtype = base.dtype if isinstance(base, QuantizedLinear) else base.weight.dtype
        if self.split is None and dtype == torch.float32:
            return super().forward(x, *args, **options)

        (adapter,) = self.scaling
        scaling = self.scaling[adapter]
        a = self.lora_A[adapter].weight
        b = self.lora_B[adapter].weight
        if self.split is not None:
            a, b = self.split.local(a, b)
            x = x.to(dtype)
            low = self.split.join(F.linear(x, a.to(x.dtype)))
            return base(x) + F.linear(low, b.to(x.dtype) * scaling)

        if not self.is_merged:
            x = x.to(dtype)
            dropped = self.lora_dropout[adapter](x)
            return base(x) + low_rank_product(dropped, a.to(x.dtype), b.to(x.dtype) * scaling)

        y = MergedProduct.apply(x, base.weight, a, b, scaling, base)
        if base.bias is not None:
            y = y + base.bias

        # A merged matrix has no dropout: what dropout changes in the adapter's input is added.
        dropout = self.lora_dropout[adapter]
        if self.training and getattr(dropout, "p", 0.0) > 0:
            x = x.to(a.dtype)
            change = F.linear(F.linear(dropout(x) - x, a), b)
            y = y + (scaling * change).to(y.dtype)
        return y


class MergedProduct(torch.autograd.Function):
    """x merge(W, A, B)^T, with gradients of x, A and B.

    `base` is the layer that `weight` belongs to. The backward pass computes the merged matrix
    again, so that it takes no memory in between.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float, base: nn.Linear
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scaling = scaling
        ctx.base = base
        return F.linear(x, merge(_matrix(base, weight), a, b, scaling))

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None, None]:
        x, weight, a, b = ctx.saved_tensors
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ merge(_matrix(ctx.base, weight), a, b, ctx.scaling)

        rows = grad.flatten(0, -2).to(b.dtype)
        inputs = x.flatten(0, -2).to(a.dtype)
        if ctx.needs_input_grad[2]:
            grad_a = ctx.scaling * ((rows @ b).T @ inputs)
        if ctx.needs_input_grad[3]:
            grad_b = ctx.scaling * (rows.T @ F.linear(inputs, a))
        return grad_x, None, grad_a, grad_b, None, None


def _matrix(base: nn.Linear, weight: Tensor) -> Tensor:
    return base.matrix(weight) if isinstance(base, QuantizedLinear) else weight


def merge(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return W + s B A [out, in] in the dtype of W, computed in float32 without gradient.

    `weight` is W [out, in], `a` is A [rank, in], and `b` is B [out, rank].

    In the first tens of steps the elements of s B A are below half a step of bfloat16, and rounding
    to the nearest number would return W itself. So an element is rounded up or down in proportion
    to where it lies between the two neighbours: up if that fraction exceeds a threshold that is
    fixed for each element of a matrix (dithering, Roberts 1962). The result is right on average at
    any size of the adapter, equal to W for an adapter of 0, and the same wherever and whenever it
    is computed.
    """
    if weight.is_cuda and weight.dtype == torch.bfloat16:
        from lightrft.models.logits import triton

        return triton.merge(weight, a, b, scaling)

    # The product is added in place, which saves a matrix.
    merged = weight.to(torch.float32, copy=True).addmm_(b.float(), a.float(), alpha=scaling)
    if weight.dtype != torch.bfloat16:
        return merged.to(weight.dtype)

    # The upper half of a float32 is the bfloat16 below it in magnitude. A number in [0, 2^16)
    # added to the lower half carries into the upper half with the wanted frequency.
    rows = thresholds(weight.shape[0], 1, weight.device)
    columns = thresholds(weight.shape[1], 2, weight.device)
    bits = merged.view(torch.int32)
    bits += (rows[:, None] + columns) & 0xFFFF
    bits &= -0x10000
    return merged.to(torch.bfloat16)


def thresholds(num: int, seed: int, device: torch.device) -> Tensor:
    """Return numbers that look random, from 0 to 2^16 - 1: [num] int32, the same in every call.

    The threshold of an element is the sum of its row's and its column's number, modulo 2^16, so the
    thresholds of any two elements of a row are independent.
    """
    mixed = torch.arange(num, device=device, dtype=torch.int64) * 2 + seed
    for factor in MIXING:
        mixed = (mixed ^ (mixed >> 16)) * factor & 0xFFFFFFFF
    return (mixed >> 16).to(torch.int32)
