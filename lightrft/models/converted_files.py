"""Read safetensors files under the names and in the shapes of a transformers model.

Published folders often store one tensor per expert, where transformers stacks the experts of a
layer in one tensor. from_pretrained() converts the whole model. This module converts a tensor when
it is read, from the slices that are needed, with transformers' own conversions.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from lightrft.models.weight_files import WeightFiles

Slices = tuple[slice, ...]
Index = tuple[int | slice, ...]

NUM_BLOCKS = 16
MIN_BLOCK = 2**19
"""A tensor is read in NUM_BLOCKS blocks of rows, but none has fewer than MIN_BLOCK elements."""


@dataclass(slots=True)
class Conversion:
    """Stored tensors that are converted together into one or more tensors of the model."""

    converter: WeightConverter
    target: str
    """Name of the first converted tensor. transformers derives the names of the others from it."""
    sources: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Source pattern of the converter -> stored names, in natural (numeric) order."""

    @property
    def stacks(self) -> bool:
        """Return True if row i of the result needs only the i-th stored tensors, as with experts.

        They may be several that are concatenated.
        """
        first, *others = self.converter.operations
        if not isinstance(first, MergeModulelist) or first.dim != 0:
            return False
        if not others:
            return len(self.sources) == 1
        return all(isinstance(other, Concatenate) and other.dim > 0 for other in others)

    def rows(self, files: WeightFiles, rows: slice, cut: Slices) -> Iterator[tuple[Index, Tensor]]:
        """Read some rows of stacked tensors.

        Yield (index in these rows of the slices `cut`, values) for each stored tensor.
        """
        dim = next((op.dim for op in self.converter.operations if isinstance(op, Concatenate)), 1)
        first = cut[dim].start

        stop = cut[dim].stop
        offset = 0
        # Each pattern fills a range of its own in the concatenated dimension. The stored tensors
        # lack the stacked one.
        for pattern in self.converter.source_patterns:
            tensors = files.read_all(self.sources[pattern][rows]) if pattern in self.sources else []
            for row, tensor in enumerate(tensors):
                begin = max(first, offset)
                end = min(stop, offset + tensor.shape[dim - 1])
                if begin < end:
                    stored = (*cut[1:dim], slice(begin - offset, end - offset), *cut[dim + 1 :])
                    index = (row, *[slice(None)] * (dim - 1), slice(begin - first, end - first))
                    yield index, tensor[stored]
            offset += tensors[0].shape[dim - 1] if tensors else 0

    def convert(
        self, model: PreTrainedModel, tensors: dict[str, list[Tensor]]
    ) -> dict[str, Tensor]:
        """Convert the tensors and return the results by name in the model. `tensors` is emptied.

        Raise ValueError if transformers cannot convert them.
        """
        # A converter collects tensors in itself, and this one is used again.
        converter = copy.deepcopy(self.converter)
        converter.collected_tensors = tensors
        try:
            converted = converter.convert(self.target, model=model, config=model.config)
        except (RuntimeError, ValueError, LookupError) as error:
            raise ValueError(
                f"transformers cannot convert the stored tensors to {self.target} ({error})"
            ) from error

        return {
            name: tensor[0] if isinstance(tensor, list) else tensor
            for name, tensor in converted.items()
        }


class ConvertedFiles:
    """Tensors of a folder under the names and in the shapes of a model.

    Names unknown to the model are included.
    """

    def __init__(self, model: PreTrainedModel, files: WeightFiles):
        """Read the headers of `files` only.

        `model` must be neither distributed nor adapted; it may be empty.
        """
        self.model = model
        self.files = files
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name in the model -> shape of the whole tensor."""
        self._stored: dict[str, str] = {}
        """Name in the model -> stored name, for tensors that need no conversion."""
        self._conversions: dict[str, Conversion] = {}
        """Name in the model -> conversion that produces the tensor."""

        stored = files.shapes()
        # Converting tensors without memory gives the shapes, and no file is read.
        for conversion in self._find(stored):
            sources = {
                pattern: [torch.empty(stored[name], device="meta") for name in names]
                for pattern, names in conversion.sources.items()
            }
            for name, tensor in conversion.convert(model, sources).items():
                self._conversions[name], self.shapes[name] = conversion, tuple(tensor.shape)

        self.shapes |= {name: stored[stored_name] for name, stored_name in self._stored.items()}

    def read(self, name: str, cut: Slices) -> Iterator[tuple[Index, Tensor]]:
        """Read slices of a tensor in pieces, on the host and in the stored dtype.

        Yield (index in the slices, values). Rows outside of them are not read. The pieces are
        views of the files, and a few rows are mapped at a time. Only a conversion that does more
        than to stack and concatenate returns all of them in memory of its own.
        """
        conversion = self._conversions.get(name)
        if conversion is not None and not conversion.stacks:
            sources = {
                pattern: self.files.read_all(names) for pattern, names in conversion.sources.items()
            }
            yield (), conversion.convert(self.model, sources)[name][cut]
            return

        if not cut:
            yield (), self.files.read(self._stored[name], cut)
            return

        first = cut[0].start
        stop = cut[0].stop
        # Blocks of rows bound how much of a file is mapped at once.
        row_size = max(1, math.prod(self.shapes[name][1:]))
        step = max(1, math.ceil((stop - first) / NUM_BLOCKS), MIN_BLOCK // row_size)

        for begin in range(first, stop, step):
            rows = slice(begin, min(begin + step, stop))
            if conversion is None:
                values = self.files.read(self._stored[name], (rows, *cut[1:]))
                yield (slice(rows.start - first, rows.stop - first),), values
            else:
                for (row, *index), values in conversion.rows(self.files, rows, cut):
                    yield (row + rows.start - first, *index), values

    def check_shape(self, name: str, expected: Sequence[int]) -> None:
        """Raise ValueError if a tensor has another shape than the model expects."""
        if self.shapes[name] != tuple(expected):
            raise ValueError(
                f"{self.origin(name)} has shape {self.shapes[name]} in the folder, but"
                f" {tuple(expected)} in the model"
            )

    def origin(self, name: str) -> str:
        """Return the file and stored name of a tensor, for error messages."""
        if name in self._stored:
            return f"{self.files.files[self._stored[name]]}: {self._stored[name]}"
        names = [stored for names in self._conversions[name].sources.values() for stored in names]
        return (
            f"{self.files.files[names[0]].parent}: {name}, converted from {names[0]} and"
            f" {len(names) - 1} more,"
        )

    def _find(self, stored: dict[str, tuple[int, ...]]) -> list[Conversion]:
        """Rename the stored tensors as from_pretrained() does.

        Return the conversions for tensors that need more than a new name.
        """
        parameters = self.model.state_dict(keep_vars=True)
        prefix = self.model.base_model_prefix
        mapping = get_model_conversion_mapping(self.model)
        renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
        converters = [step for step in mapping if isinstance(step, WeightConverter)]
        by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }

        conversions: dict[str, Conversion] = {}
        for original in sorted(stored, key=dot_natural_key):
            name, pattern = rename_source_key(original, renamings, converters, prefix, parameters)
            # A renaming may not be meant for this model: it already has the name.
            if name not in parameters and original in parameters:
                name, pattern = rename_source_key(original, [], [], prefix, parameters)
            if pattern is not None and name in parameters:
                conversion = conversions.setdefault(name, Conversion(by_pattern[pattern], name))
                conversion.sources[pattern].append(original)
            else:
                self._stored.setdefault(name, original)

        return list(conversions.values())
