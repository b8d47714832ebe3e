"""Store a slice of a flattened tensor in torch's distributed checkpoints.

ZeRO splits tensors wherever its partitions end. In a checkpoint such a fragment is stored as a few
boxes of the whole tensor, so that every strategy can read what any other has written, on any number
of ranks.
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
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box, one each per dim."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements `start` to `start + len(values)` of a flattened tensor of `shape`.

    There are none if `values` is empty.
    """

    shape: torch.Size
    start: int
    values: Tensor
    """[n], a view that loading writes into."""

    def size(self) -> torch.Size:
        return self.shape

    def slices(self) -> dict[tuple[int, ...], Tensor]:
        """Return offsets in the whole tensor -> this rank's values there.

        The values are boxes in the order of the elements.
        """
        found = {}
        position = 0
        for offsets, sizes in boxes(tuple(self.shape), self.start, self.start + len(self.values)):
            found[offsets] = self.values[position : position + prod(sizes)].view(sizes)
            position += prod(sizes)
        return found

    def __deepcopy__(self, _: dict) -> "Fragment":
        """Copy to host memory; a default deep copy of a view would copy the whole storage."""
        return Fragment(self.shape, self.start, self.values.to("cpu", copy=True))

    # -- interface of torch.distributed.checkpoint for custom tensors

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
        return [
            ChunkStorageMetadata(torch.Size(offsets), piece.shape)
            for offsets, piece in self.slices().items()
        ]


class SavePlanner(DefaultSavePlanner):
    """Torch's planner for saving, with support for fragments.

    The plan of the first checkpoint is used for the next ones with the same tensors. Rank 0 makes
    it for all ranks, in a time that grows with the number of ranks, and keeps it. Torch keeps the
    plans of a process under one key: it would take the plan of a single rank for a plan of several,
    and the others would wait forever.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = f"{type(self).__name__} of {num_ranks} ranks"

    def forget_plans(self) -> None:
        """Forget the plans after a failure; all ranks call it.

        The failure may have left the plans of the ranks in different states.
        """
        caches = (
            self._cached_save_plan,
            self._cached_final_save_plan,
            self._cached_all_plans,
            self._cached_global_plan,
            self._cached_metadata,
        )
        for cache in caches:
            cache.pop(self._cached_plans_key, None)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if isinstance(value, Fragment):
            return value.slices()[tuple(index.offset)]
        return super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """Torch's planner for loading, with support for fragments.

    Loaded values are written into the views of fragments, not into the state itself. Plain values
    are read with `weights_only`, so that they cannot run code.
    """

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        flat, _ = flatten_state_dict(state_dict)
        super().set_up_planner(state_dict, *args, **kwargs)
        self.state_dict |= {
            name: value for name, value in flat.items() if isinstance(value, Fragment)
        }

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        if isinstance(value, Fragment):
            return value.slices()[tuple(index.offset)]
        return super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], plain)


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Yield the fewest boxes that hold the elements from `start` to `end` of a flattened tensor.

    The tensor has the given `shape`, and the boxes come in the order of the elements.
    """
    if start == end:
        return
    if len(shape) < 2:
        yield ((start,), (end - start,)) if shape else ((), ())
        return

    # At most three boxes: the end of a started row, whole rows, the beginning of another one.
    row = prod(shape[1:])
    first = -(-start // row)
    last = end // row
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
