"""Matrix products whose rows do not depend on how many rows are computed together.

A BLAS chooses its kernel by the number of rows, so a token that is decoded alone gets other last
bits than the same token in a packed batch. From a few rows on the kernels agree on most machines;
where they do not, every product is computed in blocks of equal size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product as product_of

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightrft.config.errors import ConfigError
from lightrft.models.parallel.device import float32_product

LEAST = 8
"""Rows from which on kernels usually agree."""
ROW_BLOCK = 32
"""Rows of a block where they do not."""
COUNTS = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 31, 32, 33, 64, 65, 127, 128, 200)
"""Numbers of rows that a probe compares with LARGEST."""
LARGEST = 256
BATCHES = (1, 2, 3, 8, 17)
"""Numbers of matrices in a batched product that a probe compares."""


@dataclass(frozen=True, slots=True)
class Products:
    """A way to compute products: all rows at once, or in blocks."""

    block: int = 0
    """Rows of each block; 0: all rows together, and at least LEAST."""

    @property
    def multiple(self) -> int:
        """Return the number that padded rows are a multiple of."""
        return self.block or LEAST

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return inputs [..., K] times the transpose of weight [N, K], plus bias: [..., N]."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        num = len(rows)
        if not self.block:
            rows = F.pad(rows, (0, 0, 0, max(0, LEAST - num)))
            output = F.linear(rows, weight, bias)
        else:
            blocks = F.pad(rows, (0, 0, 0, -num % self.block)).split(self.block)
            output = torch.cat([F.linear(block, weight, bias) for block in blocks])

        return output[:num].reshape(*inputs.shape[:-1], -1)

    def batched(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left [B, M, K] times right [B, K, N]: [B, M, N]."""
        num = left.shape[1]
        if not self.block:
            return torch.bmm(F.pad(left, (0, 0, 0, max(0, LEAST - num))), right)[:, :num]

        blocks = F.pad(left, (0, 0, 0, -num % self.block)).split(self.block, 1)
        return torch.cat([torch.bmm(block, right) for block in blocks], 1)[:, :num]

    def logits(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return rows [M, H] times the transpose of weight [V, H] in float32: [M, V]."""
        num = len(rows)
        padded = F.pad(rows, (0, 0, 0, -num % self.multiple))
        chunks = padded.split(self.block or len(padded))
        empty = (torch.empty(len(chunk), len(weight), device=rows.device) for chunk in chunks)
        outputs = [
            float32_product(chunk, weight, out) for chunk, out in zip(chunks, empty, strict=True)
        ]
        return torch.cat(outputs)[:num]

    def __str__(self) -> str:
        if self.block:
            return f"in blocks of {self.block} rows"
        return f"of at least {LEAST} rows"


def use_exact_products(model: nn.Module, products: Products) -> None:
    """Let the linear layers of a model compute with `products`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear, products, module)


def _linear(products: Products, layer: nn.Linear, inputs: Tensor) -> Tensor:
    return products.linear(inputs, layer.weight, layer.bias)


@dataclass(frozen=True, slots=True)
class ProductShapes:
    """The products that a model consists of."""

    linear: frozenset[tuple[int, int]]
    """Shapes [N, K] of the weights of linear layers."""
    head: tuple[int, int]
    """Shape [V, H] of the weight that makes float32 logits."""
    batched: frozenset[tuple[int, int]]
    """Shapes [K, N] of the right sides of batched products, in float32."""
    dtype: torch.dtype
    """Dtype of the weights."""


@cache
def chosen_products(shapes: ProductShapes, device: torch.device, threads: int) -> Products:
    """Return the fastest products whose rows depend on nothing else here.

    `threads` only says what the answer holds for. Raise ConfigError if blocks of equal size differ
    too.
    """
    problems = []
    for products in (Products(), Products(ROW_BLOCK)):
        problem = next(_problems(products, shapes, device), "")
        if not problem:
            return products
        problems.append(f"products {products} differ for {problem}")

    raise ConfigError(
        f"--exact is not possible on this machine with {threads} threads: {'; '.join(problems)}"
    )


def _problems(products: Products, shapes: ProductShapes, device: torch.device) -> Iterator[str]:
    """Yield each product whose rows change with the number of rows."""
    options = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    for num, width in [shapes.head, *sorted(shapes.linear)]:
        weight = (torch.randn(num, width, **options) / width**0.5).to(shapes.dtype)
        rows = torch.randn(LARGEST, width, **options).to(shapes.dtype)
        product = products.logits if (num, width) == shapes.head else products.linear
        together = product(rows, weight)
        for count, first in product_of(COUNTS, (True, False)):
            # The first rows, and the last ones at another index in their product.
            some = slice(count) if first else slice(-count, None)
            if not torch.equal(product(rows[some], weight), together[some]):
                yield f"{count} of {LARGEST} rows of {width} numbers times {num} columns"

    for width, num in sorted(shapes.batched):
        left = torch.randn(max(BATCHES), LARGEST, width, **options)
        right = torch.randn(max(BATCHES), width, num, **options)
        together = products.batched(left, right)
        for size, count in product_of(BATCHES, COUNTS):
            alone = products.batched(left[-size:, -count:].contiguous(), right[-size:])
            if not torch.equal(alone, together[-size:, -count:]):
                yield f"{size} times {count} rows of {width} numbers, and {num} columns"
