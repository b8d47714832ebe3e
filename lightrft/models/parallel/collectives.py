"""Collectives along one axis of the mesh, of tensors, objects, numbers and dicts of numbers.

Only Axis.begin_sum() modifies the caller's tensor.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

Op = Literal["mean", "sum", "max", "min"]

FIRST_BYTES = 2048
"""Bytes of an object that gather() sends before the ranks know the sizes of all objects."""

SIZE_BYTES = 8

ALIGNMENT = 64
"""Multiple of bytes where each buffer of a packed object begins."""


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        value: Tensor,
        function: Callable[[Tensor], Tensor],
        gradient: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.gradient = gradient
        return function(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, of_result: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(of_result), None, None


def with_gradient(
    value: Tensor, function: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `function(value)`; `gradient` computes the gradient of the value from the result's."""
    return _WithGradient.apply(value, function, gradient)


def same(value: Tensor) -> Tensor:
    """Return the same values as another tensor, as a function with a gradient must."""
    return value.view_as(value)


@dataclass(frozen=True)
class Axis:
    """Axis of ranks: size, this rank's index and the process group."""

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None
    """None if the axis has one rank: every collective is then the identity."""
    largest: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)
    """Largest number of rows that gather_rows() has seen, the same on all ranks."""

    @classmethod
    def of(cls, name: str, group: dist.ProcessGroup) -> Self:
        """Return the axis of the ranks of a process group that this rank is in."""
        size = dist.get_world_size(group)
        return cls(name, size, dist.get_rank(group), group if size > 1 else None)

    def sum(self, value: Tensor) -> Tensor:
        return value if self.size == 1 else self._reduce(value, dist.ReduceOp.SUM)

    def begin_sum(self, value: Tensor) -> Callable[[], Tensor]:
        """Start to sum a contiguous tensor in place; return a function that waits for the sum."""
        if self.size == 1:
            return lambda: value
        work = dist.all_reduce(value, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return value

        return wait

    def max(self, value: Tensor) -> Tensor:
        return value if self.size == 1 else self._reduce(value, dist.ReduceOp.MAX)

    def min(self, value: Tensor) -> Tensor:
        return value if self.size == 1 else self._reduce(value, dist.ReduceOp.MIN)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable object, in rank order.

        For small objects only: numbers, names, plans. It takes one collective, or two if the object
        of a rank has more than FIRST_BYTES bytes.
        """
        if self.size == 1:
            return [value]

        content = pickle.dumps(value)
        # Ranks have to agree on a size, so the beginning of each object travels with its size.
        first = len(content).to_bytes(SIZE_BYTES) + content[:FIRST_BYTES]
        messages = self._gather_bytes(first.ljust(SIZE_BYTES + FIRST_BYTES, b"\0"))
        most = max(int.from_bytes(message[:SIZE_BYTES]) for message in messages)
        if most <= FIRST_BYTES:
            messages = [message[SIZE_BYTES:] for message in messages]
        else:
            messages = self._gather_bytes(content.ljust(most, b"\0"))

        return [pickle.loads(message) for message in messages]  # what follows a pickle is ignored

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the object of the axis's rank `source` on all ranks.

        For small objects only.
        """
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=source)
        return box[0]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    def exchange(self, chunks: list[Tensor]) -> list[Tensor]:
        """Send `chunks[r]` to rank r and return the chunks received from all ranks, in rank order.

        Chunks agree in dtype and trailing dimensions; the first dimension may differ.
        """
        if self.size == 1:
            return list(chunks)
        # Every rank has to know how much it will receive before it can allocate.
        sent = torch.tensor([len(chunk) for chunk in chunks], device=chunks[0].device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        counts = received.tolist()
        return list(self.all_to_all(torch.cat(chunks), sent.tolist(), counts).split(counts))

    def gather_rows(self, rows: Tensor, note: int = 0) -> tuple[list[Tensor], list[int]]:
        """Return the rows and the notes of all ranks, in rank order.

        `rows` are [n, w] int64, with w at least 2; `note` is one number of this rank. It takes one
        collective, or two if a rank has more rows than any had before.
        """
        if self.size == 1:
            return [rows], [note]

        while True:
            # Rows are padded to the largest number so far, so usually no sizes have to be exchanged
            # first.
            (most,) = self.largest
            padded = rows.new_zeros(1 + most, rows.shape[1])
            padded[0, 0], padded[0, 1] = len(rows), note
            padded[1 : 1 + len(rows)] = rows[:most]
            gathered = rows.new_empty(self.size * len(padded), rows.shape[1])
            dist.all_gather_into_tensor(gathered, padded, group=self.group)

            of_ranks = gathered.split(len(padded))
            counts = [int(each[0, 0]) for each in of_ranks]
            if max(counts) <= most:
                notes = [int(each[0, 1]) for each in of_ranks]
                return [
                    each[1 : 1 + count] for each, count in zip(of_ranks, counts, strict=True)
                ], notes
            self.largest[0] = max(counts)

    def all_to_all(self, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent[r]` consecutive rows of `flat` to rank r.

        Return the `received[r]` rows of all ranks, end to end.
        """
        if self.size == 1:
            return flat
        out = flat.new_empty(sum(received), *flat.shape[1:])
        dist.all_to_all_single(out, flat, received, sent, group=self.group)
        return out

    def broadcast_tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the axis's rank 0.

        Each rank's tensor has the same shape and dtype.
        """
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def exchange_objects(self, objects: list[Any]) -> list[Any]:
        """Exchange picklable objects as exchange() does, on the host.

        What an object holds repeatedly is sent once. This rank's own object is returned
        itself. It takes the memory of what is sent to others and of what arrives, once.
        """
        if self.size == 1:
            return list(objects)

        packed = [[] if rank == self.rank else _pack(value) for rank, value in enumerate(objects)]
        sent = torch.tensor([sum(map(len, pieces)) for pieces in packed])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        flat = torch.cat(
            [torch.empty(0, dtype=torch.uint8), *(piece for pieces in packed for piece in pieces)]
        )
        arrived = self.all_to_all(flat, sent.tolist(), received.tolist()).split(received.tolist())

        return [
            objects[rank] if rank == self.rank else _unpack(chunk)
            for rank, chunk in enumerate(arrived)
        ]

    def broadcast_tensors(self, value: Any) -> Any:
        """Return the picklable object of the axis's rank 0 on all ranks, on the host.

        Its tensors are not pickled.
        """
        if self.size == 1:
            return value
        sent = _pack(value) if self.rank == 0 else []
        size = torch.tensor(sum(map(len, sent)))
        dist.broadcast(size, group=self.group, group_src=0)
        flat = torch.cat(sent) if sent else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(flat, group=self.group, group_src=0)
        return value if self.rank == 0 else _unpack(flat)

    def _gather_bytes(self, content: bytes) -> list[bytes]:
        """Return the bytes of all ranks, which have as many as this one."""
        local = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        gathered = local.new_empty(self.size, len(local))
        dist.all_gather_into_tensor(gathered.view(-1), local, group=self.group)
        return [each.numpy().tobytes() for each in gathered]

    def _reduce(self, value: Tensor, op: dist.ReduceOp) -> Tensor:
        result = value.detach().clone()
        dist.all_reduce(result, op=op, group=self.group)
        return result


# -- numbers and tensors of a strategy


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
    gathered = axis.gather(_on_host(data))
    if isinstance(data, dict):
        return {
            key: _concatenate([local[key] for local in gathered], value)
            for key, value in data.items()
        }
    return _concatenate(gathered, data)


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
    for (key, value), values in zip(
        data.items(), flat.split([tensor.numel() for tensor in tensors.values()]), strict=True
    ):
        if isinstance(value, Tensor):
            reduced[key] = values.view(value.shape).to(value.device, _result_dtype(value.dtype, op))
        else:
            reduced[key] = _number(value, values.item(), op)

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


def _concatenate(pieces: list[Any], like: Any) -> Any:
    if not isinstance(like, Tensor):
        return pieces
    return torch.cat([piece.reshape(1) if piece.ndim == 0 else piece for piece in pieces]).to(
        like.device
    )


# -- objects with tensors, as bytes


class _Pickler(pickle.Pickler):
    """Pickler that does not copy the values of tensors on the host."""

    def reducer_override(self, value: Any) -> Any:
        if (
            type(value) is not Tensor
            or value.device.type != "cpu"
            or value.layout != torch.strided
            or value.requires_grad
        ):
            return NotImplemented
        contents = value.contiguous().flatten().view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(contents), value.dtype, value.shape)


def _tensor(contents: memoryview, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if len(contents):
        return torch.frombuffer(contents, dtype=dtype).view(shape)
    return torch.empty(shape, dtype=dtype)


def _pack(value: Any) -> list[Tensor]:
    """Return [bytes] uint8 tensors for _unpack(): sizes, pickle, values.

    They share the memory of the tensors of `value`.
    """
    stream = io.BytesIO()
    buffers = []
    _Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(value)
    contents = [
        torch.frombuffer(content, dtype=torch.uint8)
        for content in (stream.getbuffer(), *(buffer.raw() for buffer in buffers))
        if content.nbytes
    ]
    # The receiver gets one flat buffer, and finds the contents by these sizes.
    sizes = torch.tensor(
        [1 + len(buffers), stream.getbuffer().nbytes, *(buffer.raw().nbytes for buffer in buffers)]
    )

    return [
        piece
        for content in (sizes.view(torch.uint8), *contents)
        for piece in (content, content.new_zeros(-len(content) % ALIGNMENT))
    ]


def _unpack(flat: Tensor) -> Any:
    """Return the object of the [bytes] uint8 of _pack(); its tensors share this memory."""
    (count,) = flat[:8].view(torch.int64).tolist()
    start = 8 * (1 + count)
    pieces = []
    for size in flat[8:start].view(torch.int64).tolist():
        start += -start % ALIGNMENT
        pieces.append(flat[start : start + size].numpy().data)
        start += size
    return pickle.loads(pieces[0], buffers=pieces[1:])
