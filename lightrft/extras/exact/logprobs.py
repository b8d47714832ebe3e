"""Log-probs whose rows do not depend on how many rows are computed together."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.extras.exact.products import Products
from lightrft.models.logits.logprobs import Upstream, chunk_rows, scaled_logits, token_logprobs
from lightrft.models.logits.truncation import ALL, HOST_BLOCK, Truncation, without_padding

ONE_THREAD = 2**15
"""Numbers that torch sums with one thread; the sum of a single longer row is divided."""


def row_multiple(products: Products, like: Tensor, vocabulary: int) -> int:
    """Return the number of rows that logits are padded to a multiple of.

    A host reads logits some rows at a time, and a chunk with a single row is summed by all threads.
    So no chunk may be smaller than another.
    """
    if like.device.type != "cpu" or vocabulary < ONE_THREAD:
        return products.multiple
    return math.lcm(products.multiple, max(1, HOST_BLOCK // vocabulary))


def chunk_of(products: Products, like: Tensor, vocabulary: int) -> int:
    """Return the rows of logits that are computed together."""
    multiple = row_multiple(products, like, vocabulary)
    if products.block:
        return multiple
    # The truncation of a chunk is decided in four pieces.
    return max(1, chunk_rows(like, vocabulary) // (4 * multiple)) * 4 * multiple


def exact_token_logprobs(
    products: Products,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    truncation: Truncation = ALL,
    upstream: Upstream | None = None,
    units: list[int] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return what token_logprobs() returns, computed in whole chunks.

    The gradients always come from the backward pass: `upstream` with its `units` would choose other
    chunks.
    """
    num = len(hidden)
    size, _ = without_padding(truncation, len(weight))
    missing = -num % row_multiple(products, hidden, size)
    logprobs, entropy = token_logprobs(
        F.pad(hidden, (0, 0, 0, missing)),
        weight,
        F.pad(targets, (0, 0) * (targets.dim() - 1) + (0, missing), value=-100),
        truncation=truncation,
        chunk=chunk_of(products, hidden, size),
        **options,
    )
    return logprobs[:num], None if entropy is None else entropy[:num]


def exact_logits(
    products: Products,
    hidden: Tensor,
    weight: Tensor,
    size: int,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Return logits / temperature of the first `size` tokens as exact_token_logprobs() has them.

    hidden [R, H], weight [V, H] -> [R, size] float32, with R padded as above.
    """
    missing = -len(hidden) % row_multiple(products, hidden, size)
    rows = F.pad(hidden, (0, 0, 0, missing))
    logits = torch.empty(len(rows), size, device=hidden.device)
    chunk = chunk_of(products, hidden, size)
    for some, out in zip(rows.split(chunk), logits.split(chunk), strict=True):
        scaled_logits(some, weight, temperature, softcap, out=out)
    return logits
