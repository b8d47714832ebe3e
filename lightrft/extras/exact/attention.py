"""Attention that gives a token the same bits in every batch, packed or padded, cached or not.

Keys are read in blocks that are counted from the first token of a sequence, and each block is added
to the result of those before it (arXiv 2205.14135). So a token's sums have the same terms in the
same order, whatever else is computed with it. All sums are float32.

Shapes: B sequences, n queries, S keys, H heads, H_kv of them with keys, g = H / H_kv, D columns.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import AttentionInterface

from lightrft.extras.exact.products import Products
from lightrft.models.attention.flat import configured_window
from lightrft.models.attention.layout import Layout

EXACT_ATTENTION = "lightrft_exact"
KEYS = 64
"""Keys of a block."""
NO_SCORE = -1e30
"""Largest score of a query before the first block."""


@dataclass(frozen=True, slots=True)
class CachedRows:
    """Sequences [B] in rows that end together, padded on the left; with their keys in a cache."""

    padding: Tensor
    """Number of tokens of padding in each row: [B] int64."""
    length: int
    """Number of tokens in a row, with the padding."""


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Sequences [B] that get equal numbers of new tokens."""

    tokens: Tensor
    """Index of each new token among all sequences' tokens: [B, n]."""
    position: Tensor
    """Position of each new token in the sequence: [B, n]."""
    pages: Tensor
    """Pages of each sequence in order: [B, most pages]."""
    longest: int
    """Tokens of the longest sequence, with the new ones."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Sequences whose last tokens are computed, one after another, with keys in a paged cache.

    The keys of the new tokens [T] are written to the cache first.
    """

    caches: list[Tensor]
    """Keys and values of each layer: [pages, H_kv, tokens of a page, 2 D]."""
    slots: Tensor
    """Page * tokens of a page + index in the page, for each new token: [T]."""
    groups: list[PagedGroup]

    @classmethod
    def of(
        cls, caches: list[Tensor], slots: Tensor, pages: Tensor, lengths: Tensor, counts: list[int]
    ) -> Self:
        """Group sequences [B] with `lengths` [B] tokens, after `counts` new ones.

        Decoded tokens are computed together, and so are prompts of the same length.
        """
        size = caches[0].shape[2]
        starts = torch.tensor([0, *accumulate(counts)])
        numbers = torch.tensor(counts)
        groups = []
        for count in sorted(set(counts)):
            (chosen,) = torch.where(numbers == count)
            chosen_lengths = lengths[chosen]
            longest = int(chosen_lengths.max())
            new = torch.arange(count)
            tokens = starts[chosen][:, None] + new
            position = chosen_lengths[:, None] - count + new
            groups.append(
                PagedGroup(tokens, position, pages[chosen, : -(-longest // size)], longest)
            )
        return cls(caches, slots, groups)


@dataclass(frozen=True, slots=True)
class AttentionScores:
    """Form of the scores of queries and keys."""

    products: Products
    scaling: float
    window: int | None
    softcap: float | None

    def of(self, query: Tensor, key: Tensor, position: Tensor, start: int) -> Tensor:
        """Return the scores [B, H_kv, n, g, KEYS] of queries [B, H_kv, n, g, D] float32.

        The keys [B, H_kv, KEYS, D] belong to the block at `start`. Keys that a query at its
        `position` [B, n] does not see have -inf.
        """
        sizes = query.shape
        rows = query.flatten(0, 1).flatten(1, 2)
        columns = key.float().flatten(0, 1).transpose(1, 2).contiguous()
        scores = self.products.batched(rows, columns).view(*sizes[:-1], KEYS) * self.scaling
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()

        at = torch.arange(start, start + KEYS, device=key.device)
        hidden = at > position[..., None]
        if self.window is not None:
            hidden |= at <= position[..., None] - self.window
        return scores.masked_fill_(hidden[:, None, :, None], -torch.inf)

    def slopes(self, scores: Tensor) -> Tensor | float:
        """Return the derivative of scores [...] by products of queries and keys."""
        if self.softcap is None:
            return self.scaling
        return self.scaling * (1 - (scores / self.softcap).nan_to_num(neginf=0.0).square())


class _BlockwiseAttention(torch.autograd.Function):
    """Attention of queries [B, H_kv, n, g, D] to keys and values [B, H_kv, S, D].

    S is a multiple of KEYS, and the last query is at most at position `longest` - 1. The backward
    pass computes the scores of each block again.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor,
        longest: int,
        scores: AttentionScores,
    ) -> Tensor:
        wide = query.float()
        output = wide.new_zeros(*query.shape[:-1], value.shape[-1])
        largest = wide.new_full((*query.shape[:-1], 1), NO_SCORE)
        total = torch.zeros_like(largest)

        for start in range(0, longest, KEYS):
            rows = _seeing(query, longest, start)
            block = slice(start, start + KEYS)
            weights = scores.of(wide[:, :, rows], key[:, :, block], position[:, rows], start)
            top = torch.maximum(largest[:, :, rows], weights.amax(-1, keepdim=True))
            weights = weights.sub_(top).exp_()
            fade = (largest[:, :, rows] - top).exp_()
            sums = scores.products.batched(
                weights.flatten(0, 1).flatten(1, 2), value[:, :, block].float().flatten(0, 1)
            )
            output[:, :, rows] = output[:, :, rows] * fade + sums.view_as(output[:, :, rows])
            total[:, :, rows] = total[:, :, rows] * fade + weights.sum(-1, keepdim=True)
            largest[:, :, rows] = top

        output /= total
        ctx.save_for_backward(query, key, value, position, output, largest, total)
        ctx.longest = longest
        ctx.scores = scores
        return output.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, position, output, largest, total = ctx.saved_tensors
        scores = ctx.scores
        wide = query.float()
        gradient = gradient.float()
        share = (gradient * output).sum(-1, keepdim=True)
        of_query = torch.zeros_like(wide)
        of_key = torch.zeros_like(key, dtype=torch.float32)
        of_value = torch.zeros_like(value, dtype=torch.float32)

        for start in range(0, ctx.longest, KEYS):
            rows = _seeing(query, ctx.longest, start)
            block = slice(start, start + KEYS)
            some = scores.of(wide[:, :, rows], key[:, :, block], position[:, rows], start)
            weights = (some - largest[:, :, rows]).exp_() / total[:, :, rows]
            upstream = gradient[:, :, rows]
            of_weights = torch.einsum("bhngd,bhkd->bhngk", upstream, value[:, :, block].float())
            of_scores = weights * (of_weights - share[:, :, rows]) * scores.slopes(some)

            of_value[:, :, block] = torch.einsum("bhngk,bhngd->bhkd", weights, upstream)
            of_key[:, :, block] = torch.einsum("bhngk,bhngd->bhkd", of_scores, wide[:, :, rows])
            of_query[:, :, rows] += torch.einsum(
                "bhngk,bhkd->bhngd", of_scores, key[:, :, block].float()
            )

        gradients = (of_query, of_key, of_value)
        inputs = (query, key, value)
        return *(x.to(y.dtype) for x, y in zip(gradients, inputs, strict=True)), None, None, None


def _seeing(query: Tensor, longest: int, start: int) -> slice:
    """Return the queries that may see keys from `start` on: the last ones."""
    return slice(max(0, start - (longest - query.shape[2])), None)


def blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    longest: int,
    scores: AttentionScores,
) -> Tensor:
    """Return the attention [B, n, H, D] of queries [B, n, H, D] at `position` [B, n].

    key and value [B, longest, H_kv, D] begin with the first token of each sequence.
    """
    num_kv = key.shape[2]
    queries = query.unflatten(2, (num_kv, -1)).transpose(1, 2)
    keys, values = (F.pad(x.transpose(1, 2), (0, 0, 0, -longest % KEYS)) for x in (key, value))
    output = _BlockwiseAttention.apply(queries, keys, values, position, longest, scores)
    return output.transpose(1, 2).flatten(2, 3)


def attention_name(products: Products) -> str:
    """Return the name under which transformers finds the attention with these products."""
    name = f"{EXACT_ATTENTION}_{products.multiple}"
    AttentionInterface.register(name, partial(exact_attention, products))
    return name


def exact_attention(
    products: Products,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | CachedRows | PagedRows | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention of a flat batch, or of rows with a cache.

    query [B, H, n, D], key and value [B, H_kv, S, D] -> ([B, n, H, D], None); B is 1 for a flat
    batch and for a paged cache. Raise ValueError for what has no exact form.
    """
    if layout is None or dropout or s_aux is not None:
        problem = "passes no layout on" if layout is None else "has dropout or sinks"
        raise ValueError(f"--exact: the attention of {type(module).__name__} {problem}")

    scores = AttentionScores(
        products,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        configured_window(module) if sliding_window is None else sliding_window,
        softcap,
    )
    tensors = [x.transpose(1, 2) for x in (query, key, value)]
    if isinstance(layout, CachedRows):
        return _of_rows(tensors, layout, scores), None
    flat = [x[0] for x in tensors]
    if isinstance(layout, PagedRows):
        cache = layout.caches[module.layer_idx]
        return _of_pages(flat, layout, cache, scores).unsqueeze(0), None
    return _of_batch(flat, layout, scores).unsqueeze(0), None


def _of_rows(tensors: list[Tensor], rows: CachedRows, scores: AttentionScores) -> Tensor:
    """Compute attention of rows [B, S, ...] after moving each row's first token to the front."""
    query, key, value = tensors
    # A layer with a window has dropped the keys that no query sees any more.
    dropped = rows.length - key.shape[1]
    key, value = (F.pad(x, (0, 0, 0, 0, dropped, 0)) for x in (key, value))
    positions = torch.arange(rows.length, device=key.device)
    # Keys behind the last token of a row are never seen.
    source = (positions + rows.padding[:, None]).clamp(max=rows.length - 1)[..., None, None]
    key, value = (x.gather(1, source.expand(-1, -1, *x.shape[2:])) for x in (key, value))

    # Queries of padding see one key, so that they remain numbers.
    position = (positions[rows.length - query.shape[1] :] - rows.padding[:, None]).clamp(min=0)
    return blockwise(query, key, value, position, rows.length, scores)


def _of_pages(
    tensors: list[Tensor], rows: PagedRows, cache: Tensor, scores: AttentionScores
) -> Tensor:
    """Compute attention of new tokens [T, ...] after writing these to the layer's cache."""
    query, key, value = tensors
    size = cache.shape[2]
    cache[rows.slots // size, :, rows.slots % size] = torch.cat([key, value], -1)
    output = torch.empty_like(query)

    for group in rows.groups:
        cached = cache[group.pages].transpose(2, 3).flatten(1, 2)[:, : group.longest]
        keys, values = cached.chunk(2, -1)
        some = query[group.tokens]
        output[group.tokens] = blockwise(some, keys, values, group.position, group.longest, scores)
    return output


def _of_batch(tensors: list[Tensor], layout: Layout, scores: AttentionScores) -> Tensor:
    """Compute attention of a flat batch [U, ...], with a copy of a shared prefix per sequence."""
    blocks = layout.blocks
    sizes = [size * width for size, width in blocks.shapes]
    source = blocks.source
    padded = [x if source is None else x.index_select(0, source) for x in tensors]
    outputs = []

    for (size, width), *parts in zip(blocks.shapes, *(x.split(sizes) for x in padded), strict=True):
        position = torch.arange(width, device=tensors[0].device).expand(size, -1)
        parts = (x.unflatten(0, (size, width)) for x in parts)
        outputs.append(blockwise(*parts, position, width, scores).flatten(0, 1))

    output = torch.cat(outputs)
    return output if blocks.positions is None else output.index_select(0, blocks.positions)
