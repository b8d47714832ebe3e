"""Reduce and gather numbers, tensors, and dicts of them over ranks.

The caller's objects are never changed.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from lightrft.parallel.collectives import Axis

Op = Literal["mean", "sum", "max", "min"]


def all_reduce(data: Any, op: Op, axis: Axis) -> Any:
    """Reduce a number, a tensor, or a flat dict of both over the ranks of `axis`.

    Returns a new object of equal type and device. The dtype is kept too, but the mean of integers
    is a float. A dict is reduced in one collective; all ranks must give the same keys and shapes.
    """
    if op not in ("mean", "sum", "max", "min"):
        raise ValueError(f"all_reduce: unknown op {op!r}; known: mean, sum, max, min")
    if isinstance(data, dict):
        return _reduce_dict(data, op, axis)
    if isinstance(data, Tensor):
        wide = data.detach()
        if data.dtype == torch.bool:
            wide = wide.long()
        elif data.dtype.is_floating_point and data.dtype.itemsize < 4:
            wide = wide.float()  # bfloat16 would lose the sum over many ranks
        return _reduce(wide, op, axis).to(_result_dtype(data.dtype, op))
    return _reduce_dict({"": _check(data)}, op, axis)[""]


def all_gather(data: Any, axis: Axis) -> Any:
    """Gather from the ranks of `axis`, in order; everything is sent through the host.

    Tensors are concatenated along the first dim (0-dim ones too), numbers are listed, dicts are
    gathered by key. First dims may differ between ranks.
    """
    parts = axis.gather(_on_host(data))
    if isinstance(data, dict):
        return {
            key: _concatenate([part[key] for part in parts], value) for key, value in data.items()
        }
    return _concatenate(parts, data)


def _reduce_dict(data: dict[str, Any], op: Op, axis: Axis) -> dict[str, Any]:
    """Reduce all values as one float64 vector: it is exact for integers below 2^53."""
    if not data:
        return {}

    tensors = {
        key: value.detach() if isinstance(value, Tensor) else torch.tensor(_check(value))
        for key, value in data.items()
    }
    flat = torch.cat([tensor.to("cpu", torch.float64).reshape(-1) for tensor in tensors.values()])

    flat = _reduce(flat, op, axis)
    # Values go back to the devices and dtypes that they came from.
    reduced = {}
    for (key, value), part in zip(
        data.items(), flat.split([tensor.numel() for tensor in tensors.values()]), strict=True
    ):
        if isinstance(value, Tensor):
            reduced[key] = part.view(value.shape).to(value.device, _result_dtype(value.dtype, op))
        else:
            reduced[key] = _number(value, part.item(), op)

    return reduced


def _reduce(value: Tensor, op: Op, axis: Axis) -> Tensor:
    if op == "mean":
        return axis.sum(value) / axis.size
    return getattr(axis, op)(value).clone()


def _result_dtype(dtype: torch.dtype, op: Op) -> torch.dtype:
    """Return float32 for a mean of integers, int64 for a sum of booleans, else `dtype`."""
    if op == "mean" and not dtype.is_floating_point:
        return torch.float32
    return torch.int64 if op == "sum" and dtype == torch.bool else dtype


def _number(like: int | float | bool, value: float, op: Op) -> int | float | bool:
    if op == "mean" or isinstance(like, float):
        return value
    return bool(value) if isinstance(like, bool) and op in ("max", "min") else int(value)


def _check(value: Any) -> int | float | bool:
    if not isinstance(value, int | float):
        raise TypeError(
            f"only numbers, tensors and dicts of them are reduced, not {type(value).__name__}"
        )
    return value


def _on_host(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _on_host(value) for key, value in data.items()}
    return data.detach().cpu() if isinstance(data, Tensor) else data


def _concatenate(parts: list[Any], like: Any) -> Any:
    if not isinstance(like, Tensor):
        return parts
    return torch.cat([part.reshape(1) if part.ndim == 0 else part for part in parts]).to(
        like.device
    )
