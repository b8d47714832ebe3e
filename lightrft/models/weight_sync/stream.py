"""Stream every parameter under its name in transformers: full, in the transfer dtype, in buckets.

A shard is cast before it is gathered, so the bytes sent are parameters x transfer dtype, once for
every axis that shards them. At most two buckets exist in addition to the model at any time: the
gathered shards, and the full tensors built from them. A tensor larger than a bucket exists once,
beside one bucket of gathered rows. On an accelerator the next bucket is gathered while an engine
loads the current one, so buckets are half as large. On CPUs shards are gathered in memory that the
ranks of a host share. It holds two buckets of that size (models/parallel/shm_all_gather.py).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.device import ahead, free_memory
from lightrft.models.parallel.dtensor_slices import ShardSlice, shard_slices
from lightrft.models.parallel.shm_all_gather import AllGather
from lightrft.models.weight_sync.names import NamedTensor

FREE_SHARE = 8
"""Divisor of the free memory that gives the size of a bucket if none is configured."""
HOST_LIMIT = 512 * 2**20
"""Size of such a bucket on a CPU in bytes.

Free memory is no measure there, because other processes use it too.
"""
MOST_ON_HOST = 16 * 2**20
"""Most bytes to gather at once on a CPU, whatever the size of a bucket."""


@runtime_checkable
class HasHFParameters(Protocol):
    """Module of a role that knows the Hugging Face names of its parameters."""

    def hf_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter), tied ones once."""


def hf_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of a transformers model or a role, tied ones once.

    Raise TypeError for any other module.
    """
    if isinstance(model, PreTrainedModel):
        return model.named_parameters()
    if isinstance(model, HasHFParameters):
        return model.hf_parameters()
    raise TypeError(
        f"{type(model).__name__} is not a transformers model and has no hf_parameters()"
    )


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) of the buffers that are saved with the model's weights."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def unwrap(model: nn.Module) -> nn.Module:
    """Return the first transformers model inside `model`, or `model` if there is none.

    The first may be `model` itself.
    """
    return next((each for each in model.modules() if isinstance(each, PreTrainedModel)), model)


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
    divided: DeviceMesh | None = None,
) -> Iterator[NamedTensor]:
    """Yield (name, full tensor of `dtype`) for plain and sharded parameters, in order.

    They are gathered on `device` (None: the device of the parameters). Shards in host memory are
    copied there first, because devices cast and gather much faster.

    `divided`: mesh of one dimension over which the first dim of some tensors stays divided. They
    are yielded as DTensors with the shard of this rank.

    All ranks of the sharding mesh must consume the whole stream. A yielded tensor stays valid as
    long as it is referenced; an unsharded parameter that already has the dtype is yielded itself.
    A tensor of more than `limit` bytes is gathered some rows at a time. Nothing else is gathered
    until the caller asks for the next one, so drop it first to have memory for one such tensor
    only. Raise ValueError for a partial parameter: it is not summed yet.
    """
    parameters = iter(parameters)
    first = next(parameters, None)
    if first is None:
        return

    device = device or first[1].device
    # On a CPU, allocations above 32 MB always get new memory, and touching that takes longer than
    # the gather. On an accelerator two buckets exist at a time (see ahead()) and share the limit.
    limit = min(limit, MOST_ON_HOST) if device.type == "cpu" else limit // 2
    gather = partial(_gather_bucket, dtype=dtype, device=device, limit=limit, divided=divided)
    gathered = map(gather, buckets(chain([first], parameters), limit, dtype))
    for bucket in gathered if device.type == "cpu" else ahead(gathered, device, limit):
        while bucket:
            # Nothing here refers to a tensor while the next one is gathered.
            yield bucket.pop(0)


def buckets(
    named_tensors: Iterable[NamedTensor], limit: int, dtype: torch.dtype | None = None
) -> Iterator[list[NamedTensor]]:
    """Yield lists of consecutive tensors that have at most `limit` bytes together.

    Bytes are counted in `dtype` (None: as they are). A larger tensor is in a list of its own.
    """
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in named_tensors:
        nbytes = tensor.numel() * (dtype or tensor.dtype).itemsize
        if bucket and size + nbytes > limit:
            yield bucket
            bucket = []
            size = 0
        bucket.append((name, tensor))
        size += nbytes

    if bucket:
        yield bucket


def _gather_bucket(
    bucket: list[NamedTensor],
    dtype: torch.dtype,
    device: torch.device,
    limit: int,
    divided: DeviceMesh | None = None,
) -> list[NamedTensor]:
    """Return the full tensors of one bucket.

    The last sharding is undone first, with one all-gather for each group and level.
    """
    shardings = [
        shard_slices(tensor) if isinstance(tensor, DTensor) else [] for _, tensor in bucket
    ]
    stays = [False] * len(bucket)
    if divided is not None:
        kept = divided.get_group().group_name
        stays = [any(shard.group.group_name == kept for shard in shards) for shards in shardings]
        shardings = [
            [shard for shard in shards if shard.group.group_name != kept] for shards in shardings
        ]
    tensors = [
        tensor.to_local().detach()
        if isinstance(tensor, DTensor)
        # The device casts, because it is faster than the host.
        else tensor.detach().to(device, non_blocking=True).to(dtype)
        for _, tensor in bucket
    ]

    for level in range(max(map(len, shardings))):
        # Tensors of one group share an all-gather.
        by_group: dict[str, list[int]] = defaultdict(list)
        for index, shards in enumerate(shardings):
            if level < len(shards):
                by_group[shards[level].group.group_name].append(index)

        for members in by_group.values():
            shards = [shardings[index][level] for index in members]
            gathered = _gather([tensors[index] for index in members], shards, dtype, device, limit)
            for index, tensor in zip(members, gathered, strict=True):
                tensors[index] = tensor

    # A DTensor that is sharded on one rank only is not gathered.
    tensors = [tensor.to(device, non_blocking=True).to(dtype) for tensor in tensors]
    return [
        (name, DTensor.from_local(tensor, divided, [Shard(0)]) if stay else tensor)
        for (name, _), tensor, stay in zip(bucket, tensors, stays, strict=True)
    ]


def _gather(
    local_shards: list[Tensor],
    shards: list[ShardSlice],
    dtype: torch.dtype,
    device: torch.device,
    limit: int,
) -> list[Tensor]:
    """Undo one sharding of each tensor, all over the same group."""
    tensors = [torch.empty(shard.shape, dtype=dtype, device=device) for shard in shards]
    most_rows = max(shard.rows for shard in shards)
    step = max(1, most_rows)
    if sum(tensor.nbytes for tensor in tensors) > limit:
        # It is alone in the bucket; the gathered rows of all ranks fill a bucket at a time.
        row_bytes = shards[0].pieces * shards[0].rest.numel() * dtype.itemsize
        step = max(1, limit // row_bytes)

    for start in range(0, most_rows, step):
        _gather_rows(local_shards, shards, tensors, slice(start, start + step))
    return tensors


def _gather_rows(
    local_shards: list[Tensor], shards: list[ShardSlice], tensors: list[Tensor], rows: slice
) -> None:
    """Gather these rows of each rank's shards, and write them where they belong in `tensors`."""
    counts = [len(range(*rows.indices(shard.rows))) for shard in shards]
    sizes = [count * shard.rest.numel() for count, shard in zip(counts, shards, strict=True)]
    gather = AllGather(sum(sizes), tensors[0].dtype, tensors[0].device, shards[0].group)

    for destination, local_shard, shard in zip(
        gather.local.split(sizes), local_shards, shards, strict=True
    ):
        local = local_shard.movedim(shard.dim, 0)[rows].to(gather.local.device, non_blocking=True)
        # This copy casts, so it comes after the one to the device and before the all-gather.
        destination[: local.numel()].view(local.shape).copy_(local)

    gather.run()
    gathered = gather.gathered.split(sizes, dim=1)
    for pieces, count, shard, tensor in zip(gathered, counts, shards, tensors, strict=True):
        if count:
            _write_rows(pieces.unflatten(1, (count, *shard.rest)), shard, tensor, rows)


def _write_rows(pieces: Tensor, shard: ShardSlice, tensor: Tensor, rows: slice) -> None:
    """Write `pieces` [ranks, rows, ...]: the same rows of each rank's shard of `tensor`.

    The padding behind the last shard is left out.
    """
    target = tensor.movedim(shard.dim, 0)
    num_whole = len(target) // shard.rows
    whole, rest = target.split([num_whole * shard.rows, len(target) % shard.rows])
    whole.unflatten(0, (num_whole, shard.rows))[:, rows].copy_(pieces[:num_whole])

    # At most one rank has a shorter shard. Those after it have none.
    rest = rest[rows]
    if len(rest):
        rest.copy_(pieces[num_whole, : len(rest)])
