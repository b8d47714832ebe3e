"""Attention over flat batches: sequences are concatenated, and none attends to another.

The function is registered with transformers under the name `lightrft`. It uses one of two kernels:
variable-length flash attention if the device supports it, otherwise torch's own over blocks of
sequences of similar length, padded on the right. Plain causal attention is correct there, because
padding follows all tokens of a sequence. Both make several calls if sequences share a prefix, ranks
split the queries, or tokens of an image look ahead: see prefix_attention.py. Only prefixes of a few
tokens are copied on a CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from lightrft.models.attention.layout import Layout, Scoring
from lightrft.models.attention.prefix_attention import (
    CPU_KERNEL,
    CallKernel,
    prefix_attention,
    window_mask,
)
from lightrft.models.parallel.device import has_flash_attention
from lightrft.models.parallel.recompute import KEPT, once

ATTENTION = "lightrft"

Kernel = Callable[..., Tensor]
"""(query [T, H, D], key and value [T, H_kv, D], layout, scoring) -> [T, H, D]."""


def attention_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Choose the kernel for whole sequences."""
    if not _flash(device, dtype):
        return block_attention
    from lightrft.models.attention.flash_attn import flash_kernel

    return flash_kernel() or block_attention


def call_kernel(device: torch.device, dtype: torch.dtype) -> CallKernel | None:
    """Choose the kernel for sequences in several calls.

    None if no kernel returns log-sum-exps, as for float32 on an accelerator.
    """
    if _flash(device, dtype):
        from lightrft.models.attention.flash_attn import FLASH_CALLS, activate_newer_kernels

        activate_newer_kernels()
        return FLASH_CALLS
    return CPU_KERNEL if device.type in ("cpu", "meta") else None


def _flash(device: torch.device, dtype: torch.dtype) -> bool:
    return has_flash_attention(device) and dtype in (torch.bfloat16, torch.float16)


def flat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    exchanges: bool = True,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention over this rank's tokens of a flat batch.

    query [1, H, t, D], key and value [1, H_kv, t, D] -> ([1, t, H, D], None), or without the last
    exchange between ranks what after_attention() takes. A token attends to `sliding_window` tokens,
    itself included. `softcap` c replaces a score s by c tanh(s / c). `s_aux` [H] are sinks: scores
    of one more key for each head, without a value (gpt-oss, arXiv 2508.10925). Raise ValueError for
    a family that does not pass the layout on.
    """
    if layout is None:
        raise ValueError(
            f"{type(module).__name__} cannot compute flat batches: its layers do not pass the"
            " arguments of a model on to attention"
        )
    # Phi-3.5-MoE applies its window in the mask alone.
    if sliding_window is None:
        sliding_window = configured_window(module)

    query, key, value = layout.sequence.before_attention(
        *(x[0].transpose(0, 1) for x in (query, key, value))
    )
    sinks = None if s_aux is None else layout.sequence.local_heads(s_aux)
    window = sliding_window if sliding_window and sliding_window < layout.longest else None
    inputs = query, key, value, layout, Scoring(scaling, window, dropout, softcap, sinks)
    # Merging the calls needs log-sum-exps, and dropout needs the probabilities over all keys at
    # once.
    if layout.needs_several_calls or softcap is not None or sinks is not None:
        kernel = None if dropout or softcap else call_kernel(query.device, query.dtype)
        # Copies in another dtype would round the gradient of a prefix once for each copy.
        copies = query.dtype == torch.float32 and layout.copies_are_faster(query[0].numel())
        if kernel is CPU_KERNEL and window is None and copies and sinks is None:
            output = block_attention(*inputs)
        elif kernel is None:
            output = copied_attention(*inputs)
        else:
            output = prefix_attention(kernel, *inputs)
    else:
        output = attention_kernel(query.device, query.dtype)(*inputs)

    return layout.sequence.after_attention(output).unsqueeze(0) if exchanges else output, None


def kept_attention(*inputs: Any, dropout: float = 0.0, **options: Any) -> tuple[Tensor, None]:
    """Compute flat_attention(), and keep what it needs if a block is recomputed.

    Only the last exchange between ranks is repeated. With dropout all is: it would not draw again
    otherwise, so all later draws would differ.
    """
    if dropout:
        return flat_attention(*inputs, dropout=dropout, **options)
    output = once(lambda: flat_attention(*inputs, exchanges=False, **options)[0])
    return options["layout"].sequence.after_attention(output).unsqueeze(0), None


def configured_window(module: nn.Module) -> int | None:
    """Return how many tokens a layer attends to by the configuration; None: all."""
    config = getattr(module, "config", None)
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or getattr(config, "use_sliding_window", True) is False:
        return None

    kinds = getattr(config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    return window if kinds is None or layer is None or kinds[layer] == "sliding_attention" else None


def copied_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scoring: Scoring
) -> Tensor:
    """Compute attention per sequence, with copies of all keys.

    This is the fallback for dropout, which needs the probabilities over all keys, for soft-capped
    scores, and for devices without a call_kernel(). Raise ValueError if ranks split the queries of
    bidirectional tokens.
    """
    if layout.bidirectional is not None and layout.queries_are_split:
        raise ValueError(
            "--sp_impl zigzag computes bidirectional attention of images only on a CPU, or in"
            " bfloat16 by flash attention, and without dropout: use --bf16 and an attention_dropout"
            " of 0, or --sp_impl ulysses"
        )

    call = layout.with_copies(scoring.window or layout.longest)
    run_ids = [None] * len(call.key_lengths)
    if layout.bidirectional is not None:
        run_ids = call.keys.of(layout.run_ids).split(call.key_lengths)
    queries = query.split(call.query_lengths)

    keys, values = (call.keys.of(x).split(call.key_lengths) for x in (key, value))
    outputs = []
    for q, k, v, runs in zip(queries, keys, values, run_ids, strict=True):
        mask = window_mask(len(q), call.window, q.device, num_keys=len(k), run_ids=runs)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        if scoring.softcap is None and scoring.sinks is None:
            options = {"scale": scoring.scaling, "dropout_p": scoring.dropout}
            grouped = {"attn_mask": mask, "enable_gqa": q.shape[1] != k.shape[1]}
            out = F.scaled_dot_product_attention(q, k, v, **grouped, **options)
        else:
            out = _dense_attention(q, k, v, mask, scoring)
        outputs.append(out[0].transpose(0, 1))

    return torch.cat(outputs)


def _dense_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring
) -> Tensor:
    """Compute attention with all scores of a sequence in memory: [1, H, q, D]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * (scoring.scaling or query.shape[-1] ** -0.5)
    if scoring.softcap is not None:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)

    if scoring.sinks is not None:
        columns = scoring.sinks.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, columns], -1)
    probabilities = scores.softmax(-1)[..., : key.shape[2]].to(query.dtype)
    return F.dropout(probabilities, scoring.dropout) @ value


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scoring: Scoring
) -> Tensor:
    """Compute torch's scaled dot product attention block by block."""
    blocks = layout.blocks
    window = scoring.window
    inputs = (query, key, value)
    if blocks.source is not None:
        inputs = [x.index_select(0, blocks.source) for x in inputs]

    # A split has one concatenation as the gradient; slices would have a sum for each.
    sizes = [size * width for size, width in blocks.shapes]
    outputs = []
    for (size, width), q, k, v in zip(
        blocks.shapes, *(x.split(sizes) for x in inputs), strict=True
    ):
        q, k, v = (x.view(size, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        # Without a mask torch may choose a faster causal kernel.
        mask = window_mask(width, window, query.device) if window and width > window else None
        options = {"attn_mask": mask, "is_causal": mask is None, "scale": scoring.scaling}
        options |= {"dropout_p": scoring.dropout, "enable_gqa": q.shape[1] != k.shape[1]}
        out = F.scaled_dot_product_attention(q, k, v, **options)
        outputs.append(out.transpose(1, 2).flatten(0, 1))

    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return output if blocks.positions is None else output.index_select(0, blocks.positions)


AttentionInterface.register(ATTENTION, flat_attention)
AttentionInterface.register(KEPT + ATTENTION, kept_attention)
