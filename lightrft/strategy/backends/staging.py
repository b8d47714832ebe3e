"""Copy the state of a checkpoint to host memory, where no training step can change it.

torch has two stagers. BlockingAsyncStager copies a DTensor of a GPU twice, into memory that is not
pinned. DefaultStager keeps pinned memory under the storage that it was copied from, so it pins all
of it again when an optimizer has been offloaded in between, and it copies whole storages of views.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from lightrft.models.parallel.device import synchronize
from lightrft.strategy.backends.offload import HostCopies, is_on_device
from lightrft.strategy.checkpoint.zero_fragment import Fragment


@torch.no_grad()
def to_host(state: Any) -> Any:
    """Copy this rank's shards in a structure of dictionaries and lists to host memory.

    Tensors of an accelerator go to pinned memory at the full speed of the bus, and the host waits
    once for all of them. The copies are in the stream of the training step, so they hold the values
    at the time of the call. When the state is dropped, torch keeps the pinned blocks for the next
    checkpoint and for offloaded models.
    """
    leaves, structure = tree_flatten(state)
    shards = [_local(leaf) for leaf in leaves]
    on_device = [shard for shard in shards if shard is not None and is_on_device(shard)]

    arriving = iter(HostCopies(on_device).copies)
    copies = [_copied(leaf, shard, arriving) for leaf, shard in zip(leaves, shards, strict=True)]
    if on_device:
        synchronize(on_device[0].device)
    return tree_unflatten(copies, structure)


def num_bytes(state: Any) -> int:
    """Return the bytes of this rank's shards in a structure of dictionaries and lists."""
    return sum(shard.nbytes for shard in map(_local, tree_iter(state)) if shard is not None)


def _local(leaf: Any) -> Tensor | None:
    """Return this rank's shard of a tensor, or None for a value of another kind."""
    if isinstance(leaf, DTensor):
        return leaf.to_local()
    if isinstance(leaf, Fragment):
        return leaf.values
    return leaf if isinstance(leaf, Tensor) else None


def _copied(leaf: Any, shard: Tensor | None, pinned: Iterator[Tensor]) -> Any:
    """Return a leaf of the same kind in host memory, with the next pinned copy if it has one."""
    if shard is None:
        return copy.deepcopy(leaf)
    if is_on_device(shard):
        host = next(pinned)
    else:
        host = torch.empty(shard.shape, dtype=shard.dtype).copy_(shard)
    if isinstance(leaf, DTensor):
        # DTensor.from_local() would move it back to the device of the mesh.
        return DTensor(host, leaf._spec, requires_grad=False)
    return replace(leaf, values=host) if isinstance(leaf, Fragment) else host
