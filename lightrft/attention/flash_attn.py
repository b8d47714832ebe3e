"""Variable-length flash attention: torch's own if it supports windows, else the flash-attn package;
in parts always torch's.
"""

from collections.abc import Callable
from functools import cache, partial
from inspect import signature

import torch
from torch import Tensor

from lightrft.attention.layout import Layout, Part
from lightrft.attention.prefix_attention import PartKernel, pad_values


@cache
def flash_kernel() -> Callable[..., Tensor] | None:
    """Return the kernel of this installation, or None. torch has it since 2.10, with windows and
    scaling a little later.
    """
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


def torch_varlen(
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    scaling: float | None,
    window: int | None,
    dropout: float,
) -> Tensor:
    """Run `torch.nn.attention.varlen.varlen_attn`: query [T, H, D], key and value [T, H_kv, D] ->
    [T, H, D].

    Raise ValueError for dropout, which this kernel does not have.
    """
    if dropout:
        raise ValueError(
            "torch's variable-length attention has no dropout; set attention_dropout of the model"
            " to 0"
        )

    value, columns = pad_values(value, query)
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(function).parameters else {}
    if not grouped:
        key, value = (
            x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value)
        )

    offsets = layout.offsets
    longest = layout.longest
    output = function(
        query,
        key,
        value,
        offsets,
        offsets,
        longest,
        longest,
        scale=scaling,
        window_size=_sides(window),
        **grouped,
    )

    return output[..., :columns]


def package_varlen(
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    scaling: float | None,
    window: int | None,
    dropout: float,
) -> Tensor:
    """Run `flash_attn.flash_attn_varlen_func`: query [T, H, D], key and value [T, H_kv, D] -> [T,
    H, D].
    """
    value, columns = pad_values(value, query)
    offsets = layout.offsets
    longest = layout.longest
    output = function(
        query,
        key,
        value,
        offsets,
        offsets,
        longest,
        longest,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
        window_size=_sides(window),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )

    return output[..., :columns]


def _sides(window: int | None) -> tuple[int, int]:
    """Return the number of visible tokens before and after each token: the window includes the
    token; -1 is unbounded.
    """
    return (-1 if window is None else window - 1, 0)


# -- attention in parts: the operations that varlen_attn calls, whose backward pass accepts any
# output and log-sum-exp


def _forward(
    query: Tensor, key: Tensor, value: Tensor, part: Part, scaling: float | None
) -> tuple[Tensor, Tensor]:
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *_lengths(part), 0.0, part.causal, False, scale=scaling, **_window(part)
    )
    return output, lse.t()


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
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # dropout state
    unused = torch.empty(0, device=query.device)
    return torch.ops.aten._flash_attention_backward(
        gradient.contiguous(),
        query,
        key,
        value,
        output,
        lse.t().contiguous(),
        *_lengths(part),
        0.0,
        part.causal,
        state,
        unused,
        scale=scaling,
        **_window(part),
    )


FLASH_PARTS = PartKernel(_forward, _backward)


def _lengths(part: Part) -> tuple[Tensor, Tensor, int, int]:
    return *part.offsets, max(part.query_lengths), max(part.key_lengths)


def _window(part: Part) -> dict[str, int]:
    """Return the window options.

    As in flash attention, the last query of a run is aligned with its last key.
    """
    before, after = _sides(part.window) if part.causal or part.window is not None else (-1, -1)
    return {"window_size_left": before, "window_size_right": after}
