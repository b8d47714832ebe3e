"""Attention in several calls: each query's keys are split into runs, and no keys are copied.

Attention over all keys is the mean of the outputs of the calls, weighted by the exponentials of
their log-sum-exps. The gradient of a call is computed by the kernel's own backward pass from the
merged output and the merged log-sum-exp: with these, the recomputed probabilities are taken over
all keys. Ring attention does the same (arXiv 2310.01889). So all queries read a shared prefix in
one call, which also sums the gradient. Image tokens that look ahead have one more call.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lightrft.models.attention.layout import AttentionCall, Blocks, Layout, Scoring


class CallKernel(NamedTuple):
    """Kernel for one call.

    Shapes: queries [q, H, D], keys and values [k, H_kv, D], log-sum-exp [q, H] float32.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    """(query, key, value, call, scaling) -> output [q, H, D] and log-sum-exp."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(gradient of the output, query, key, value, output, log-sum-exp, call, scaling) -> gradients
    of query, key and value.
    """


def prefix_attention(
    kernel: CallKernel, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scoring: Scoring
) -> Tensor:
    """Return attention of this rank's queries over the keys and values of all computed tokens.

    queries [t, H, D], keys and values [U, H_kv, D] -> [t, H, D].
    """
    value, columns = pad_values(value, query)
    calls = layout.calls(scoring.window)
    inputs = query, key, value, scoring.sinks, calls, kernel, scoring.scaling
    return _MergedCalls.apply(*inputs)[..., :columns]


def pad_values(value: Tensor, query: Tensor) -> tuple[Tensor, int]:
    """Pad the values with zeros to the width of the queries, as kernels require.

    Return them with the former width.
    """
    columns = value.shape[-1]
    missing = max(query.shape[-1] - columns, 0)
    return F.pad(value, (0, missing)) if missing else value, columns


class _MergedCalls(torch.autograd.Function):
    """Attention in several calls with one merged result.

    The backward pass needs queries, keys and values, the merged output and the merged log-sum-exp.
    A sink is one more key, with the value 0: it only adds to the log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        calls: list[AttentionCall],
        kernel: CallKernel,
        scaling: float | None,
    ) -> Tensor:
        inner, *prefixes = calls
        pairs = inner.keys.of(key), inner.keys.of(value)
        output, lse = kernel.forward(query, *pairs, inner, scaling)
        if prefixes or sinks is not None:
            output = output.float()

        for call in prefixes:
            pairs = call.keys.of(key), call.keys.of(value)
            more, its_lse = kernel.forward(call.queries.of(query), *pairs, call, scaling)
            before = call.queries.of(lse)
            change = more - call.queries.of(output)
            call.queries.add_to(output, change * (its_lse - before).sigmoid().unsqueeze(-1))
            call.queries.add_to(lse, F.softplus(its_lse - before))

        if sinks is not None:
            of_keys = lse
            lse = torch.logaddexp(of_keys, sinks.float())
            output = output * (of_keys - lse).exp().unsqueeze(-1)

        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.calls = calls
        ctx.kernel = kernel
        ctx.scaling = scaling

        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        totals: list[Tensor] = []
        for call in ctx.calls:
            pairs = call.keys.of(key), call.keys.of(value)
            above, its_query, *results = map(call.queries.of, (gradient, query, output, lse))
            gradients = ctx.kernel.backward(above, its_query, *pairs, *results, call, ctx.scaling)

            selections = (call.queries, call.keys, call.keys)
            # The first call has each query once, so its gradients are where the sums start.
            if not totals:
                columns = zip(selections, gradients, (query, key, value), strict=True)
                totals = [selection.spread(each, x) for selection, each, x in columns]
                continue

            for total, selection, each in zip(totals, selections, gradients, strict=True):
                selection.add_to(total, each)

        of_sinks = None
        if sinks is not None:
            # The gradient of a score is p (its value's gradient - delta), and the value is 0.
            delta = (gradient.float() * output.float()).sum(-1)
            of_sinks = -((sinks.float() - lse).exp() * delta).sum(0).to(sinks.dtype)

        return (
            *(total.to(x.dtype) for total, x in zip(totals, (query, key, value), strict=True)),
            of_sinks,
            None,
            None,
            None,
        )


# -- the kernel of the CPU: dense blocks

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _forward(
    query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, scaling: float | None
) -> tuple[Tensor, Tensor]:
    outputs = []
    lses = []
    for (q,), (k, v), mask in _dense(call, [query], [key, value]):
        output, lse = _FORWARD(q, k, v, is_causal=call.causal, attn_mask=mask, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        lses.append(lse.transpose(1, 2).flatten(0, 1))
    return _flat(outputs, call), _flat(lses, call)


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    call: AttentionCall,
    scaling: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients_of_calls = []
    if call.causal and call.blocks.positions is not None:  # padding has no gradient
        positions = call.blocks.positions
        source = call.blocks.source
        padded = gradient.new_zeros(len(source), *gradient.shape[1:]).index_copy_(
            0, positions, gradient
        )
        gradients = padded.split([size * width for size, width in call.blocks.shapes])
    else:
        gradients = gradient.split(_sizes(call, call.query_lengths))

    for dense, above in zip(
        _dense(call, [query, output, lse], [key, value]), gradients, strict=True
    ):
        (q, o, its_lse), (k, v), mask = dense
        above = above.view(len(q), -1, *above.shape[1:]).transpose(1, 2)
        block_gradients = _BACKWARD(
            above, q, k, v, o, its_lse, 0.0, call.causal, attn_mask=mask, scale=scaling
        )
        gradients_of_calls.append([x.transpose(1, 2).flatten(0, 1) for x in block_gradients])

    return tuple(_flat(list(blocks), call) for blocks in zip(*gradients_of_calls, strict=True))


CPU_KERNEL = CallKernel(_forward, _backward)


def _dense(
    call: AttentionCall, of_queries: list[Tensor], of_keys: list[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor], Tensor | None]]:
    """Yield the tensors [tokens, heads, ...] as blocks [sequences, heads, tokens, ...].

    Each block comes with the mask of the window, if the call has one.
    """
    blocks: Blocks | None = call.blocks if call.causal else None
    if blocks is not None and blocks.source is not None:
        of_queries, of_keys = (
            [x.index_select(0, blocks.source) for x in tensors] for tensors in (of_queries, of_keys)
        )

    counts = [size for size, _ in blocks.shapes] if blocks else [1] * len(call.query_lengths)
    cut_queries = zip(*(x.split(_sizes(call, call.query_lengths)) for x in of_queries), strict=True)
    cut_keys = zip(*(x.split(_sizes(call, call.key_lengths)) for x in of_keys), strict=True)
    for count, queries, keys in zip(counts, cut_queries, cut_keys, strict=True):
        queries, keys = (
            [x.view(count, -1, *x.shape[1:]).transpose(1, 2) for x in tensors]
            for tensors in (queries, keys)
        )
        mask = None

        if call.window is not None:
            visible = window_mask(
                queries[0].shape[2], call.window, call.device, num_keys=keys[0].shape[2]
            )
            # The operation takes an additive mask only.
            mask = torch.zeros(visible.shape, dtype=keys[0].dtype, device=call.device).masked_fill_(
                ~visible, -torch.inf
            )

        yield queries, keys, mask


def _sizes(call: AttentionCall, lengths: list[int]) -> list[int]:
    return [size * width for size, width in call.blocks.shapes] if call.causal else lengths


def _flat(blocks: list[Tensor], call: AttentionCall) -> Tensor:
    """Return values in blocks in the token order of the call."""
    values = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    if call.causal and call.blocks.positions is not None:
        return values.index_select(0, call.blocks.positions)
    return values


def window_mask(
    size: int,
    window: int,
    device: torch.device,
    num_keys: int | None = None,
    run_ids: Tensor | None = None,
) -> Tensor:
    """Return a mask [S, keys] bool: each of the last S tokens sees `window` tokens up to itself.

    There are S keys for `num_keys` None. With `run_ids` [keys], see Layout.run_ids, a token also
    sees the tokens that follow it in the run.
    """
    steps = torch.arange(num_keys or size, device=device)
    distance = steps[-size:, None] - steps
    visible = distance >= 0
    if run_ids is not None:
        visible |= (run_ids[-size:, None] == run_ids) & (run_ids >= 0)
    return visible & (distance < window)
