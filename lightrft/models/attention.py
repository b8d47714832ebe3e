"""Attention over flat batches: sequences end to end, none sees another.

One function, registered with transformers under the name `lightrft`. Sequences of similar length are gathered into
right-padded blocks, where plain causal attention is already right: padding stands behind every token that counts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "lightrft"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the sequences of a flat batch lie; made once per micro-batch, used by every layer."""

    blocks: list[Tensor]
    """Each [n, S] int64: flat positions of n sequences of up to S tokens; padding repeats the last token."""
    places: Tensor
    """[T] int64: where each flat token stands in the concatenation of all blocks."""

    @classmethod
    def of(cls, lengths: Tensor, device: torch.device) -> "Layout":
        """Layout of sequences of these lengths [N]. Blocks hold lengths of one power of two: padding is under a half."""
        lengths = lengths.cpu()
        starts = lengths.cumsum(0) - lengths
        places = torch.empty(int(lengths.sum()), dtype=torch.int64)
        blocks, filled = [], 0
        for size in torch.unique(_power_of_two(lengths)).tolist():
            members = (_power_of_two(lengths) == size).nonzero()[:, 0]
            longest = int(lengths[members].max())
            steps = torch.arange(longest)
            real = steps < lengths[members, None]
            block = starts[members, None] + torch.minimum(steps, lengths[members, None] - 1)
            places[block[real]] = filled + torch.arange(block.numel()).view(block.shape)[real]
            blocks.append(block.to(device))
            filled += block.numel()
        return cls(blocks, places.to(device))


def _power_of_two(lengths: Tensor) -> Tensor:
    """The exponent of the smallest power of two that holds each length."""
    return lengths.double().log2().ceil().long()


def flat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> ([1, T, H, D], None)."""
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__} uses soft-capped or sink attention, which flat batches do not support")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for block in layout.blocks:
        size = block.shape[1]
        mask = _window_mask(size, sliding_window, query.device) if sliding_window and size > sliding_window else None
        q, k, v = (_rows(x, block) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.places).unsqueeze(0), None


def _rows(x: Tensor, block: Tensor) -> Tensor:
    """[T, H, D] at [n, S] -> [n, H, S, D]."""
    return x.index_select(0, block.flatten()).view(*block.shape, *x.shape[1:]).transpose(1, 2)


def _window_mask(size: int, window: int, device: torch.device) -> Tensor:
    """[S, S] bool: each token sees itself and the window - 1 before it."""
    steps = torch.arange(size, device=device)
    distance = steps[:, None] - steps
    return (distance >= 0) & (distance < window)


AttentionInterface.register(ATTENTION, flat_attention)
