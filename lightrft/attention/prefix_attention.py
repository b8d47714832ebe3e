"""Attention in parts: the keys of a query are split into several runs, with one call for each, and
no keys are copied.

Attention over all keys is the mean of the outputs of the parts, weighted by the exponentials of
their log-sum-exps. The gradient of a part is computed by the kernel's own backward pass from the
merged output and the merged log-sum-exp: with these, the recomputed probabilities are those over
all keys. Ring attention does the same (arXiv 2310.01889). A prefix that many sequences share is
thus read by all of their queries in one call, which also sums its gradient. Tokens of an image that
attend to those that follow them have a part for these.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lightrft.attention.layout import Blocks, Layout, Part


class PartKernel(NamedTuple):
    """Kernel for one part.

    Shapes: queries [q, H, D], keys and values [k, H_kv, D], log-sum-exp [q, H] float32.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    """(query, key, value, part, scaling) -> output [q, H, D] and log-sum-exp."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(gradient of the output, query, key, value, output, log-sum-exp, part, scaling) -> gradients
    of query, key and value."""


def prefix_attention(
    kernel: PartKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return attention of this rank's queries [t, H, D] over the keys and values [U, H_kv, D] of
    all computed tokens.
    """
    value, columns = pad_values(value, query)
    return _InParts.apply(query, key, value, layout.parts(window), kernel, scaling)[..., :columns]


def pad_values(value: Tensor, query: Tensor) -> tuple[Tensor, int]:
    """Pad the values with zeros to the width of the queries, which kernels require, and return them
    with their former width.
    """
    columns = value.shape[-1]
    return F.pad(value, (0, query.shape[-1] - columns)) if columns < query.shape[
        -1
    ] else value, columns


class _InParts(torch.autograd.Function):
    """Attention in parts that saves queries, keys and values, the merged output and its log-sum-exp
    for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        parts: list[Part],
        kernel: PartKernel,
        scaling: float | None,
    ) -> Tensor:
        own, *prefixes = parts
        output, lse = kernel.forward(query, own.keys.of(key), own.keys.of(value), own, scaling)
        if prefixes:  # not in place: recomputation may keep what a kernel returned
            output = output.to(torch.float32, copy=True)
            lse = lse.clone()

        for part in prefixes:
            more, its_lse = kernel.forward(
                part.queries.of(query), part.keys.of(key), part.keys.of(value), part, scaling
            )
            before = part.queries.of(lse)
            part.queries.add_to(
                output,
                (more - part.queries.of(output)) * (its_lse - before).sigmoid().unsqueeze(-1),
            )
            part.queries.add_to(lse, F.softplus(its_lse - before))

        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.parts = parts
        ctx.kernel = kernel
        ctx.scaling = scaling

        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        totals: list[Tensor] = []
        for part in ctx.parts:
            part_gradient, part_query, part_output, part_lse = (
                part.queries.of(x) for x in (gradient, query, output, lse)
            )
            gradients = ctx.kernel.backward(
                part_gradient,
                part_query,
                part.keys.of(key),
                part.keys.of(value),
                part_output,
                part_lse,
                part,
                ctx.scaling,
            )

            selections = (part.queries, part.keys, part.keys)
            if not totals:
                columns = zip(selections, gradients, (query, key, value), strict=True)
                totals = [
                    selection.spread(columns_gradient, x)
                    for selection, columns_gradient, x in columns
                ]
                continue

            for total, selection, columns_gradient in zip(
                totals, selections, gradients, strict=True
            ):
                selection.add_to(total, columns_gradient)

        return (
            *(total.to(x.dtype) for total, x in zip(totals, (query, key, value), strict=True)),
            None,
            None,
            None,
        )


# -- the kernel of the CPU: dense blocks

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _forward(
    query: Tensor, key: Tensor, value: Tensor, part: Part, scaling: float | None
) -> tuple[Tensor, Tensor]:
    outputs = []
    lses = []
    for (q,), (k, v), mask in _dense(part, [query], [key, value]):
        output, lse = _FORWARD(q, k, v, is_causal=part.causal, attn_mask=mask, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        lses.append(lse.transpose(1, 2).flatten(0, 1))
    return _flat(outputs, part), _flat(lses, part)


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    part: Part,
    scaling: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    parts_of_each = []
    if part.causal and part.blocks.places is not None:  # padding has no gradient
        places = part.blocks.places
        source = part.blocks.source
        padded = gradient.new_zeros(len(source), *gradient.shape[1:]).index_copy_(
            0, places, gradient
        )
        gradients = padded.split([size * width for size, width in part.blocks.shapes])
    else:
        gradients = gradient.split(_sizes(part, part.query_lengths))

    for dense, above in zip(
        _dense(part, [query, output, lse], [key, value]), gradients, strict=True
    ):
        (q, o, its_lse), (k, v), mask = dense
        above = above.view(len(q), -1, *above.shape[1:]).transpose(1, 2)
        each = _BACKWARD(
            above, q, k, v, o, its_lse, 0.0, part.causal, attn_mask=mask, scale=scaling
        )
        parts_of_each.append([x.transpose(1, 2).flatten(0, 1) for x in each])

    return tuple(_flat(list(each), part) for each in zip(*parts_of_each, strict=True))


CPU_KERNEL = PartKernel(_forward, _backward)


def _dense(
    part: Part, of_queries: list[Tensor], of_keys: list[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor], Tensor | None]]:
    """Yield the tensors [tokens, heads, ...] as blocks [sequences, heads, tokens, ...], with the
    mask of a window.
    """
    blocks: Blocks | None = part.blocks if part.causal else None
    if blocks is not None and blocks.source is not None:
        of_queries, of_keys = (
            [x.index_select(0, blocks.source) for x in each] for each in (of_queries, of_keys)
        )

    counts = [size for size, _ in blocks.shapes] if blocks else [1] * len(part.query_lengths)
    cut_queries = zip(*(x.split(_sizes(part, part.query_lengths)) for x in of_queries), strict=True)
    cut_keys = zip(*(x.split(_sizes(part, part.key_lengths)) for x in of_keys), strict=True)
    for count, queries, keys in zip(counts, cut_queries, cut_keys, strict=True):
        queries, keys = (
            [x.view(count, -1, *x.shape[1:]).transpose(1, 2) for x in each]
            for each in (queries, keys)
        )
        mask = None

        if part.window is not None:
            visible = window_mask(
                queries[0].shape[2], part.window, part.device, num_keys=keys[0].shape[2]
            )
            mask = torch.zeros(visible.shape, dtype=keys[0].dtype, device=part.device).masked_fill_(
                ~visible, -torch.inf
            )

        yield queries, keys, mask


def _sizes(part: Part, lengths: list[int]) -> list[int]:
    return [size * width for size, width in part.blocks.shapes] if part.causal else lengths


def _flat(blocks: list[Tensor], part: Part) -> Tensor:
    """Return values in blocks in the token order of the part."""
    values = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    return (
        values.index_select(0, part.blocks.places)
        if part.causal and part.blocks.places is not None
        else values
    )


def window_mask(
    size: int,
    window: int,
    device: torch.device,
    num_keys: int | None = None,
    run_ids: Tensor | None = None,
) -> Tensor:
    """Return a mask [S, keys] bool (S keys for None): each of the last S tokens sees itself and the
    window - 1 before it.

    With `run_ids` [keys], see Layout.run_ids, it also sees the tokens that follow it in its run.
    """
    steps = torch.arange(num_keys or size, device=device)
    distance = steps[-size:, None] - steps
    visible = distance >= 0
    if run_ids is not None:
        visible |= (run_ids[-size:, None] == run_ids) & (run_ids >= 0)
    return visible & (distance < window)
