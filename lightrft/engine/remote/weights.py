"""Broadcast weights, bucket by bucket, from the ranks that train to the ranks that generate."""

import json
import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.engine.remote.door import KEY
from lightrft.parallel.processes import RunProcesses
from lightrft.weight_sync.names import NamedTensor
from lightrft.weight_sync.stream import buckets


class WeightBroadcast:
    """Group for weights: the first training rank sends, and all ranks that generate receive."""

    def __init__(self, processes: RunProcesses, device: torch.device, *, bucket_bytes: int = 0):
        """Build the group; all members call this together. Only the sender needs `bucket_bytes`."""
        self.device = device
        self.bucket_bytes = bucket_bytes
        first = processes.size - processes.rollout_ranks
        place = processes.rank - first + 1 if processes.generates else 0

        size = processes.rollout_ranks + 1
        store = dist.PrefixStore(f"{KEY}/weights", processes.store)
        if device.type == "cpu":
            self._group: dist.Backend = dist.ProcessGroupGloo(store, place, size, processes.timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = processes.timeout
            self._group = dist.ProcessGroupNCCL(store, place, size, options)

    def send(self, named_tensors: Iterable[NamedTensor]) -> None:
        """Send all tensors; at most one bucket exists in addition to them."""
        for bucket in buckets(named_tensors, self.bucket_bytes):
            self._send(bucket)
        # An empty bucket says that the stream has ended.
        self._send([])

    def receive(self) -> Iterator[NamedTensor]:
        """Yield the tensors; each is valid until the next bucket is requested."""
        while True:
            # Three messages for a bucket: length of the header, header, and the tensors as bytes.
            length = self._broadcast(torch.zeros(1, dtype=torch.int64, device=self.device))
            header = self._broadcast(
                torch.empty(int(length), dtype=torch.uint8, device=self.device)
            )
            contents = [
                (name, shape, getattr(torch, dtype))
                for name, shape, dtype in json.loads(header.cpu().numpy().tobytes())
            ]
            if not contents:
                return

            size = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in contents)
            flat = self._broadcast(torch.empty(size, dtype=torch.uint8, device=self.device))
            for name, shape, dtype in contents:
                nbytes = math.prod(shape) * dtype.itemsize
                part = flat[:nbytes]
                flat = flat[nbytes:]
                yield name, part.view(dtype).view(shape)

    def _send(self, bucket: list[NamedTensor]) -> None:
        # Wide elements come first, so that each tensor is aligned in the buffer.
        bucket = sorted(bucket, key=lambda item: -item[1].itemsize)
        kinds = [
            (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in bucket
        ]
        contents = json.dumps(kinds).encode()
        header = torch.frombuffer(bytearray(contents), dtype=torch.uint8).to(self.device)
        self._broadcast(torch.tensor([len(header)], device=self.device))
        self._broadcast(header)

        if bucket:
            parts = [
                tensor.detach().to(self.device).contiguous().flatten().view(torch.uint8)
                for _, tensor in bucket
            ]
            self._broadcast(torch.cat(parts))

    def _broadcast(self, tensor: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
        return tensor
