"""Broadcast weights, bucket by bucket, from the ranks that train to the ranks that generate."""

import json
import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.engine.remote.door import STORE_PREFIX
from lightrft.models.parallel.processes import RunProcesses
from lightrft.models.weight_sync.names import NamedTensor
from lightrft.models.weight_sync.stream import buckets

SENDERS = f"{STORE_PREFIX}/senders"
"""Key of the bucket size in bytes and the ranks that send weights."""
MOST_SENDERS = 8
"""Ranks that generate have a communicator for each sender, and its buffers in device memory."""


class WeightBroadcast:
    """Groups for weights: one rank of each training node sends, and all that generate receive.

    All training ranks have the same tensors. Each sender sends an equal share of the bytes of every
    bucket, so that the nodes' network cards work at the same time. NCCL brings the shares into each
    receiving node once, and passes them on inside, so the ranks of an engine share one transfer.
    """

    def __init__(self, processes: RunProcesses, device: torch.device, *, bucket_bytes: int = 0):
        """Build the groups; all ranks of the run call this. Only rank 0 needs `bucket_bytes`."""
        first = processes.size - processes.rollout_ranks
        if processes.rank == 0:
            # The senders of a node are alike, so the first one decides for all.
            ranks = range(0, first, processes.ranks_per_node)[:MOST_SENDERS]
            processes.store.set(SENDERS, json.dumps([bucket_bytes, *ranks]))

        self.device = device
        self.bucket_bytes, *ranks = json.loads(processes.store.get(SENDERS))
        self._num_senders = len(ranks)
        self._groups = {
            number: self._group(processes, number)
            for number, rank in enumerate(ranks)
            if processes.generates or processes.rank == rank
        }
        """Number of a sender -> the group with all receivers. A sender has only its own."""

    def _group(self, processes: RunProcesses, number: int) -> dist.Backend:
        first = processes.size - processes.rollout_ranks
        rank = processes.rank - first + 1 if processes.generates else 0
        size = processes.rollout_ranks + 1
        store = dist.PrefixStore(f"{STORE_PREFIX}/weights/{number}", processes.store)
        if self.device.type == "cpu":
            return dist.ProcessGroupGloo(store, rank, size, processes.timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = processes.timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def send(self, named_tensors: Iterable[NamedTensor]) -> None:
        """Send this rank's share of all tensors, or only consume them if this rank sends nothing.

        At most one bucket of tensors is kept, in addition to the share to send.
        """
        if not self._groups:
            for _ in named_tensors:
                pass
            return

        for bucket in buckets(named_tensors, self.bucket_bytes):
            self._send(bucket)
        # An empty bucket says that the stream has ended.
        self._send([])

    def receive(self) -> Iterator[NamedTensor]:
        """Yield the tensors; each is valid until the next bucket is requested."""
        while True:
            # The first sender describes a bucket: length of the header, and header.
            length = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._broadcast(0, length).wait()
            header = torch.empty(int(length), dtype=torch.uint8, device=self.device)
            self._broadcast(0, header).wait()
            described = json.loads(header.cpu().numpy().tobytes())
            contents = [(name, shape, getattr(torch, dtype)) for name, shape, dtype in described]
            if not contents:
                return

            # All senders send their shares of the tensors' bytes.
            size = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in contents)
            flat = torch.empty(size, dtype=torch.uint8, device=self.device)
            shares = {number: self._share(number, size) for number in self._groups}
            arriving = [
                self._broadcast(number, flat[start:stop])
                for number, (start, stop) in shares.items()
                if start < stop
            ]
            for work in arriving:
                work.wait()

            for name, shape, dtype in contents:
                nbytes = math.prod(shape) * dtype.itemsize
                tensor = flat[:nbytes]
                flat = flat[nbytes:]
                yield name, tensor.view(dtype).view(shape)

    def _send(self, bucket: list[NamedTensor]) -> None:
        # Wide elements come first, so that each tensor is aligned in the buffer.
        bucket = sorted(bucket, key=lambda item: -item[1].itemsize)
        (number,) = self._groups
        if number == 0:
            kinds = [
                (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for name, tensor in bucket
            ]
            contents = json.dumps(kinds).encode()
            header = torch.frombuffer(bytearray(contents), dtype=torch.uint8).to(self.device)
            self._broadcast(0, torch.tensor([len(header)], device=self.device)).wait()
            self._broadcast(0, header).wait()

        start, stop = self._share(number, sum(tensor.nbytes for _, tensor in bucket))
        if start == stop:
            return

        pieces = []
        for _, tensor in bucket:
            content = tensor.detach().contiguous().flatten().view(torch.uint8)
            pieces.append(content[max(start, 0) : max(stop, 0)].to(self.device))
            # From here on, the share is counted from the next tensor.
            start -= len(content)
            stop -= len(content)
        self._broadcast(number, torch.cat(pieces)).wait()

    def _share(self, number: int, size: int) -> tuple[int, int]:
        """Return the first byte and the end of what a sender sends of `size` bytes."""
        return size * number // self._num_senders, size * (number + 1) // self._num_senders

    def _broadcast(self, number: int, tensor: Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._groups[number].broadcast([tensor], options)
