"""A run of elements of a flattened tensor, as torch's distributed checkpoints read and write it.

ZeRO cuts tensors wherever its partitions end. In a checkpoint such a run is a few boxes of the whole tensor, so what one
strategy on any number of ranks has written, every other reads.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, one for each dim."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements `start` to `start + len(values)` of a tensor of `shape`; none where `values` is empty."""

    shape: torch.Size
    start: int
    values: Tensor  # [n], a view: what is read goes there

    def size(self) -> torch.Size:
        return self.shape

    def parts(self) -> dict[tuple[int, ...], Tensor]:
        """Offsets in the whole tensor -> this rank's values there, boxes in the order of the elements."""
        found, position = {}, 0
        for offsets, sizes in boxes(tuple(self.shape), self.start, self.start + len(self.values)):
            found[offsets] = self.values[position : position + prod(sizes)].view(sizes)
            position += prod(sizes)
        return found

    def __deepcopy__(self, _: dict) -> "Fragment":
        """In host memory: a plain copy of a view copies all that it is a view of."""
        return Fragment(self.shape, self.start, self.values.to("cpu", copy=True))

    # -- what torch.distributed.checkpoint asks of a tensor of its own kind

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.values)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in self.parts().items()]


class SavePlanner(DefaultSavePlanner):
    """torch's, for fragments too."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        whole = self.state_dict[index.fqn]
        return whole.parts()[tuple(index.offset)] if isinstance(whole, Fragment) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """torch's, for fragments too. What is read goes where they point; in the state itself they are gone then.

    Plain values are read without pickle's power to run code.
    """

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        flat, _ = flatten_state_dict(state_dict)
        super().set_up_planner(state_dict, *args, **kwargs)
        self.state_dict |= {name: value for name, value in flat.items() if isinstance(value, Fragment)}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        whole = self.state_dict[index.fqn]
        return whole.parts()[tuple(index.offset)] if isinstance(whole, Fragment) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], plain)


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """The fewest boxes whose elements, one box after the other, are those from `start` to `end` of a tensor of `shape`."""
    if start == end:
        return
    if len(shape) < 2:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row
    if last < first:  # inside one row
        yield from _in_row(shape, last, start - last * row, end - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < end:
        yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, end: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], start, end):
        yield (row, *offsets), (1, *sizes)
