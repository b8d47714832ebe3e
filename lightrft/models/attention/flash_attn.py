"""Variable-length flash attention.

Whole sequences use torch's own kernel if it supports windows, else the flash-attn package.
Sequences in several calls always use torch's.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from inspect import signature

import torch
from torch import Tensor

from lightrft.models.attention.layout import AttentionCall, Layout, Scoring
from lightrft.models.attention.prefix_attention import CallKernel, pad_values
from lightrft.models.parallel.device import is_hopper

Varlen = Callable[..., Tensor]
"""(query, key, value, offsets of queries and keys, longest of each, window_size=) -> output."""


@cache
def flash_kernel() -> Callable[..., Tensor] | None:
    """Return the kernel of this installation, or None.

    torch has one since 2.10, with windows and scaling a little later.
    """
    activate_newer_kernels()
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        varlen_attn = None

    if (
        varlen_attn is not None
        and {"scale", "window_size"} <= signature(varlen_attn).parameters.keys()
    ):
        return partial(torch_varlen, varlen_attn)

    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None

    return partial(package_varlen, flash_attn_varlen_func)


@cache
def activate_newer_kernels() -> None:
    """Let torch's flash attention run FlashAttention-3 (arXiv 2407.08608) where it can.

    That is on Hopper, if the package of its kernels is installed; they take about half the time.
    """
    try:
        from torch.nn.attention import activate_flash_attention_impl
    except ImportError:  # torch before 2.11
        return
    if is_hopper() and find_spec("flash_attn_interface") is not None:
        activate_flash_attention_impl("FA3")


def torch_varlen(
    function: Varlen, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scoring: Scoring
) -> Tensor:
    """Run `torch.nn.attention.varlen.varlen_attn`.

    query [T, H, D], key and value [T, H_kv, D] -> [T, H, D]. Raise ValueError for dropout: this
    kernel has none.
    """
    if scoring.dropout:
        raise ValueError(
            "torch's variable-length attention has no dropout; set attention_dropout of the model"
            " to 0"
        )

    grouped = {"enable_gqa": True} if "enable_gqa" in signature(function).parameters else {}
    # This version of torch has no grouped queries, so each key and value is repeated for its
    # queries.
    if not grouped:
        key, value = (
            x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value)
        )
    function = partial(function, scale=scoring.scaling, **grouped)
    return _varlen(function, query, key, value, layout, scoring.window)


def package_varlen(
    function: Varlen, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scoring: Scoring
) -> Tensor:
    """Run `flash_attn.flash_attn_varlen_func`.

    query [T, H, D], key and value [T, H_kv, D] -> [T, H, D].
    """
    options = {"dropout_p": scoring.dropout, "softmax_scale": scoring.scaling, "causal": True}
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return _varlen(partial(function, **options), query, key, value, layout, scoring.window)


def _varlen(
    function: Varlen, query: Tensor, key: Tensor, value: Tensor, layout: Layout, window: int | None
) -> Tensor:
    value, columns = pad_values(value, query)
    ends = (layout.offsets, layout.offsets, layout.longest, layout.longest)
    return function(query, key, value, *ends, window_size=_sides(window))[..., :columns]


def _sides(window: int | None) -> tuple[int, int]:
    """Return the number of visible tokens before and after each token; -1 is unbounded.

    The window includes the token itself.
    """
    return (-1 if window is None else window - 1, 0)


# -- attention in several calls: the operations inside varlen_attn. Their backward pass accepts any
# output and log-sum-exp.


def _forward(
    query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, scaling: float | None
) -> tuple[Tensor, Tensor]:
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *_lengths(call), 0.0, call.causal, False, scale=scaling, **_window(call)
    )
    return output, lse.t()


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
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # dropout state
    unused = torch.empty(0, device=query.device)

    tensors = (gradient.contiguous(), query, key, value, output, lse.t().contiguous())
    options = (0.0, call.causal, state, unused)
    return torch.ops.aten._flash_attention_backward(
        *tensors, *_lengths(call), *options, scale=scaling, **_window(call)
    )


FLASH_CALLS = CallKernel(_forward, _backward)


def _lengths(call: AttentionCall) -> tuple[Tensor, Tensor, int, int]:
    return *call.offsets, max(call.query_lengths), max(call.key_lengths)


def _window(call: AttentionCall) -> dict[str, int]:
    """Return the window options.

    As in flash attention, the last query of a run is aligned with the last key.
    """
    before, after = _sides(call.window) if call.causal or call.window is not None else (-1, -1)
    return {"window_size_left": before, "window_size_right": after}
