"""Stream every parameter under the Hugging Face name: full, in the transfer dtype, in buckets.

A shard is cast before it is gathered, so the bytes sent are parameters x transfer dtype, once for
every axis that shards them. At most two buckets exist in addition to the model at any time: the
gathered shards, and the full tensors built from them. On an accelerator the next bucket is gathered
while an engine loads the current one, so buckets are half as large. On CPUs shards are gathered in
memory that the ranks of a host share. It holds two buckets of that size
(parallel/shm_all_gather.py).
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightrft.parallel.collectives import Axis
from lightrft.parallel.device import ahead, bucket_bytes, free_memory
from lightrft.parallel.dtensor_slices import ShardSlice, shard_slices
from lightrft.parallel.shm_all_gather import AllGather
from lightrft.weight_sync.names import NamedTensor

FREE_SHARE = 8
"""Divisor of the free memory that gives the size of a bucket if none is configured."""
HOST_LIMIT = 512 * 2**20
"""Size of such a bucket on a CPU in bytes.

Free memory is no measure there, because other processes use it too.
"""


def bucket_limit(megabytes: int, axis: Axis, device: torch.device) -> int:
    """Return the bytes of one bucket: `megabytes`, or for 0 a fraction of the free device memory.

    The ranks of `axis` agree on the minimum; all of them must call this together.
    """
    if megabytes:
        return megabytes * 2**20
    local_limit = HOST_LIMIT if device.type == "cpu" else free_memory(device)[0] // FREE_SHARE
    return min(axis.gather(local_limit))


def stream(
    parameters: Iterable[NamedTensor],
    dtype: torch.dtype,
    limit: int,
    device: torch.device | None = None,
) -> Iterator[NamedTensor]:
    """Yield (name, full tensor of `dtype`) for plain and sharded parameters, in order.

    They are gathered on `device` (None: the device of the parameters). Shards in host memory are
    copied there first, because ranks of several nodes gather much faster on the device.

    All ranks of the sharding mesh must consume the whole stream. A yielded tensor stays valid as
    long as it is referenced, and a reference keeps the bucket, of at most `limit` bytes, alive; an
    unsharded parameter that already has the dtype is yielded itself. A tensor larger than a bucket
    is sent alone. Raise ValueError for a partial parameter: it is not summed yet.
    """
    parameters = iter(parameters)
    first = next(parameters, None)
    if first is None:
        return
    device = device or first[1].device
    # Tensors come out later than their buckets go in, so names wait here.
    names = deque()
    buckets = _buckets(chain([first], parameters), dtype, bucket_bytes(device, limit))

    def full_tensors() -> Iterator[list[Tensor]]:
        for bucket in buckets:
            names.extend(name for name, _ in bucket)
            yield _gather_full([tensor for _, tensor in bucket], dtype, device)

    for tensors in ahead(full_tensors(), device):
        yield from ((names.popleft(), tensor) for tensor in tensors)


def _buckets(
    parameters: Iterable[NamedTensor], dtype: torch.dtype, limit: int
) -> Iterator[list[NamedTensor]]:
    """Yield lists of consecutive parameters whose full tensors fit into one bucket."""
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in parameters:
        nbytes = tensor.numel() * dtype.itemsize
        if bucket and size + nbytes > limit:
            yield bucket
            bucket = []
            size = 0
        bucket.append((name, tensor))
        size += nbytes

    if bucket:
        yield bucket


def _gather_full(tensors: list[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return the full tensors of one bucket.

    The last sharding is undone first, with one all-gather for each group and level.
    """
    cuts = [shard_slices(tensor) for tensor in tensors]
    parts = [
        tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach().to(dtype)
        for tensor in tensors
    ]

    for level in range(max(map(len, cuts))):
        # Tensors of one group share an all-gather.
        by_group: dict[str, list[int]] = defaultdict(list)
        for index, its_cuts in enumerate(cuts):
            if level < len(its_cuts):
                by_group[its_cuts[level].group.group_name].append(index)

        for members in by_group.values():
            gathered = _gather(
                [parts[index] for index in members],
                [cuts[index][level] for index in members],
                dtype,
                device,
            )
            for index, tensor in zip(members, gathered, strict=True):
                parts[index] = tensor

    return [part.to(dtype).to(device, non_blocking=True) for part in parts]


def _gather(
    parts: list[Tensor], cuts: list[ShardSlice], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Undo one sharding of each tensor, all over the same group. Cast before the gather."""
    sizes = [cut.numel for cut in cuts]
    gather = AllGather(sum(sizes), dtype, device, cuts[0].group)
    for destination, part, cut in zip(gather.local.split(sizes), parts, cuts, strict=True):
        rows = part.movedim(cut.dim, 0)
        destination[: rows.numel()].view(rows.shape).copy_(rows.to(dtype), non_blocking=True)

    gather.run()
    tensors = [
        _assemble(pieces, cut)
        for pieces, cut in zip(gather.gathered.split(sizes, dim=1), cuts, strict=True)
    ]
    # Shared memory is overwritten later, so what still lies in it is copied.
    shared = gather.gathered.untyped_storage().data_ptr() if gather.in_shared_memory else None

    return [
        tensor.clone() if tensor.untyped_storage().data_ptr() == shared else tensor
        for tensor in tensors
    ]


def _assemble(pieces: Tensor, cut: ShardSlice) -> Tensor:
    """Assemble `pieces` [ranks, elements of a full piece] into one tensor.

    The padding of the last pieces is cut off.
    """
    rows = pieces.reshape(cut.pieces * cut.rows, *cut.rest)[: cut.shape[cut.dim]]
    return rows.movedim(0, cut.dim).contiguous()
