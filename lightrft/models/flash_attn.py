"""Variable-length flash attention: torch's own where it has windows, else the flash-attn package."""

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from lightrft.models.attention import Layout


@cache
def flash_kernel() -> Callable[..., Tensor] | None:
    """The kernel of this installation, or None. torch has it since 2.10, with windows and scaling a little later."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        varlen_attn = None
    if varlen_attn is not None and {"scale", "window_size"} <= signature(varlen_attn).parameters.keys():
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
    layout: "Layout",
    *,
    scaling: float | None,
    window: int | None,
    dropout: float,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`: [T, H, D], [T, H_kv, D] twice -> [T, H, D]."""
    if dropout:
        raise ValueError("torch's variable-length attention has no dropout; set attention_dropout of the model to 0")
    query, key, value = layout.whole(query, key, value)
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(function).parameters else {}
    if not grouped:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    offsets, longest = layout.offsets, layout.longest
    window_size = _sides(window)
    return layout.computed(
        function(query, key, value, offsets, offsets, longest, longest, scale=scaling, window_size=window_size, **grouped)
    )


def package_varlen(
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: "Layout",
    *,
    scaling: float | None,
    window: int | None,
    dropout: float,
) -> Tensor:
    """`flash_attn.flash_attn_varlen_func`: [T, H, D], [T, H_kv, D] twice -> [T, H, D]."""
    query, key, value = layout.whole(query, key, value)
    offsets, longest = layout.offsets, layout.longest
    output = function(
        query, key, value, offsets, offsets, longest, longest,
        dropout_p=dropout, softmax_scale=scaling, causal=True, window_size=_sides(window),
    )  # fmt: skip
    return layout.computed(output)


def _sides(window: int | None) -> tuple[int, int]:
    """Tokens seen before and after each: the window counts the token itself; -1 is no bound."""
    return (-1 if window is None else window - 1, 0)
