"""The weight stream: every parameter under its Hugging Face name, full, in the transfer dtype, bucket by bucket.

A shard is cast before it is gathered, so the bytes moved are parameters x transfer dtype, once. At most one bucket and
one full tensor exist beside the model at any time.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

Named = tuple[str, Tensor]


def stream(parameters: Iterable[Named], dtype: torch.dtype, bucket_bytes: int) -> Iterator[Named]:
    """Yield (name, full tensor of `dtype`) for plain and sharded parameters, in their order.

    All ranks of the sharding mesh must consume the whole stream. A yielded tensor stays valid as long as it is held, and
    holding it holds its bucket; a plain parameter that already has the dtype is yielded itself. A tensor larger than a
    bucket travels alone.
    """
    for bucket in _buckets(parameters, dtype, bucket_bytes):
        if isinstance(bucket[0][1], DTensor):
            yield from _gathered(bucket, dtype)
        else:
            yield from ((name, tensor.detach().to(dtype)) for name, tensor in bucket)


def _buckets(parameters: Iterable[Named], dtype: torch.dtype, bucket_bytes: int) -> Iterator[list[Named]]:
    """Consecutive parameters of one kind (plain, or sharded over one mesh) that fit into one bucket."""
    bucket: list[Named] = []
    size, kind = 0, None
    for name, tensor in parameters:
        nbytes = tensor.numel() * dtype.itemsize
        its_kind = tensor.device_mesh if isinstance(tensor, DTensor) else None
        if bucket and (size + nbytes > bucket_bytes or its_kind != kind):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size, kind = size + nbytes, its_kind
    if bucket:
        yield bucket


def _gathered(bucket: list[Named], dtype: torch.dtype) -> Iterator[Named]:
    """One all-gather for the whole bucket. Every parameter is cut along its first dim into equal, zero-filled pieces."""
    group, world = _shard_group(bucket[0][1])
    pieces = [_piece(tensor, world) for _, tensor in bucket]
    mine = torch.empty(sum(rows * width for rows, width in pieces), dtype=dtype, device=bucket[0][1].to_local().device)
    start = 0
    for (_, tensor), (rows, width) in zip(bucket, pieces, strict=True):
        local = tensor.to_local().detach().reshape(-1)
        mine[start : start + local.numel()].copy_(local)  # the cast happens here, before the gather
        start += rows * width
    everyone = mine.view(1, -1)
    if world > 1:
        everyone = torch.empty(world, mine.numel(), dtype=dtype, device=mine.device)
        dist.all_gather_into_tensor(everyone.view(-1), mine, group=group)
    start = 0
    for (name, tensor), (rows, width) in zip(bucket, pieces, strict=True):
        full = everyone[:, start : start + rows * width].reshape(-1)[: tensor.numel()].view(tensor.shape)
        start += rows * width
        yield name, full


def _shard_group(tensor: DTensor) -> tuple[dist.ProcessGroup, int]:
    sharded = [dim for dim, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    if len(sharded) != 1 or tensor.placements[sharded[0]].dim != 0:
        raise ValueError(f"the weight stream knows parameters sharded once along dim 0, not {tensor.placements}")
    group = tensor.device_mesh.get_group(sharded[0])
    return group, dist.get_world_size(group)


def _piece(tensor: DTensor, world: int) -> tuple[int, int]:
    """Rows of each rank's piece, the last ones padded, and elements per row."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return -(-rows // world), tensor.numel() // max(rows, 1)
