"""Collectives along one axis of the mesh. They never modify the caller's tensor."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """Axis of ranks: its size, this rank's index and the process group."""

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None
    """None if the axis has one rank: every collective is then the identity."""
    largest: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)
    """Largest number of rows that gather_rows() has seen, the same on all ranks."""

    def sum(self, value: Tensor) -> Tensor:
        return self._reduce(value, dist.ReduceOp.SUM)

    def begin_sum(self, value: Tensor) -> Callable[[], Tensor]:
        """Start sum() for a tensor on the host, and return a function that waits for its result."""
        if self.size == 1:
            return lambda: value
        result = value.clone()
        work = dist.all_reduce(result, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return result

        return wait

    def max(self, value: Tensor) -> Tensor:
        return self._reduce(value, dist.ReduceOp.MAX)

    def min(self, value: Tensor) -> Tensor:
        return self._reduce(value, dist.ReduceOp.MIN)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable object, in rank order. For small objects only: numbers, names, plans."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the object of the axis's rank `source` on all its ranks."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=source)
        return box[0]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    def exchange(self, parts: list[Tensor]) -> list[Tensor]:
        """Send `parts[r]` to rank r and return the parts received from all ranks, in rank order.

        Parts agree in dtype and trailing dimensions; the first dimension may differ.
        """
        if self.size == 1:
            return list(parts)
        sent = torch.tensor([len(part) for part in parts], device=parts[0].device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        counts, flat = received.tolist(), torch.cat(parts)
        out = flat.new_empty(sum(counts), *flat.shape[1:])
        dist.all_to_all_single(out, flat, counts, sent.tolist(), group=self.group)
        return list(out.split(counts))

    def gather_rows(self, rows: Tensor, note: int = 0) -> tuple[list[Tensor], list[int]]:
        """Return every rank's rows [n, w] int64, with w at least 2, and its note.

        It takes one collective, or two if a rank has more rows than any had before.
        """
        if self.size == 1:
            return [rows], [note]
        while True:
            (most,) = self.largest
            part = rows.new_zeros(1 + most, rows.shape[1])
            part[0, 0], part[0, 1] = len(rows), note
            part[1 : 1 + len(rows)] = rows[:most]
            found = rows.new_empty(self.size * len(part), rows.shape[1])
            dist.all_gather_into_tensor(found, part, group=self.group)
            parts = found.split(len(part))
            counts = [int(each[0, 0]) for each in parts]
            if max(counts) <= most:
                notes = [int(each[0, 1]) for each in parts]
                return [each[1 : 1 + count] for each, count in zip(parts, counts, strict=True)], notes
            self.largest[0] = max(counts)

    def all_to_all(self, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent[r]` consecutive elements of `flat` to rank r; return the `received[r]` elements of all ranks, end to end."""
        if self.size == 1:
            return flat
        out = flat.new_empty(sum(received))
        dist.all_to_all_single(out, flat, received, sent, group=self.group)
        return out

    def broadcast_tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the axis's rank 0, which has the shape and dtype of each rank's."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def exchange_objects(self, parts: list[Any]) -> list[Any]:
        """Exchange picklable objects as exchange() does, on the host; an object that a part holds repeatedly is sent once."""
        if self.size == 1:
            return list(parts)
        sent = [torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8) for part in parts]
        return [pickle.loads(part.numpy().tobytes()) for part in self.exchange(sent)]

    def _reduce(self, value: Tensor, op: dist.ReduceOp) -> Tensor:
        if self.size == 1:
            return value
        result = value.detach().clone()
        dist.all_reduce(result, op=op, group=self.group)
        return result
