"""Safetensors files read under the names and in the shapes of a transformers model, whatever the files use.

Published folders often store one tensor per expert, where transformers stacks the experts of a layer in one tensor.
from_pretrained() converts the whole model. This module converts a tensor when it is read, from the parts that are needed, with
transformers' own conversions.
"""

import copy
from collections import defaultdict
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

Part = tuple[slice, ...]


@dataclass(slots=True)
class Conversion:
    """Stored tensors that are converted together into one or more tensors of the model."""

    converter: WeightConverter
    target: str
    """Name of the first converted tensor, from which transformers derives the names of the others."""
    sources: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Source pattern of the converter -> stored names, in natural (numeric) order."""

    @property
    def stacks(self) -> bool:
        """Return True if row i of the result comes from the i-th stored tensor alone, as with stacked experts."""
        first, *others = self.converter.operations
        merges = isinstance(first, MergeModulelist) and first.dim == 0
        return merges and all(isinstance(other, Concatenate) and other.dim > 0 for other in others)

    def convert(self, model: PreTrainedModel, tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """Convert the tensors and return the results by name in the model. `tensors` is emptied.

        Raise ValueError if transformers cannot convert them.
        """
        converter = copy.deepcopy(self.converter)
        converter.collected_tensors = tensors
        try:
            converted = converter.convert(self.target, model=model, config=model.config)
        except (RuntimeError, ValueError, LookupError) as error:
            raise ValueError(f"transformers cannot convert the stored tensors to {self.target} ({error})") from error
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}


class ConvertedFiles:
    """Tensors of a folder under the names and in the shapes of a model. Names unknown to the model are included."""

    def __init__(self, model: PreTrainedModel, files: WeightFiles):
        """Read the headers of `files` only. `model` must be neither distributed nor adapted; it may be empty."""
        self.model, self.files = model, files
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name in the model -> shape of the whole tensor."""
        self._stored: dict[str, str] = {}
        """Name in the model -> stored name, for tensors that need no conversion."""
        self._conversions: dict[str, Conversion] = {}
        """Name in the model -> conversion that produces the tensor."""
        stored = files.shapes()
        for conversion in self._find(stored):
            sources = {pattern: [torch.empty(stored[name], device="meta") for name in names]
                       for pattern, names in conversion.sources.items()}  # fmt: skip
            for name, tensor in conversion.convert(model, sources).items():
                self._conversions[name], self.shapes[name] = conversion, tuple(tensor.shape)
        self.shapes |= {name: stored[stored_name] for name, stored_name in self._stored.items()}

    def read(self, name: str, part: Part) -> Tensor:
        """Return part of a tensor, on the host and in the stored dtype. Experts outside of the part are not read."""
        if name in self._stored:
            return self.files.read(self._stored[name], part)
        conversion, rows = self._conversions[name], slice(None)
        if conversion.stacks:
            count = part[0].stop - part[0].start
            rows = part[0] if count else slice(1)  # an empty list cannot be stacked: read one tensor and take no rows of it
            part = (slice(count), *part[1:])
        sources = {pattern: self.files.read_all(names[rows]) for pattern, names in conversion.sources.items()}
        return conversion.convert(self.model, sources)[name][part]

    def origin(self, name: str) -> str:
        """Return the file and stored name of a tensor, for error messages."""
        if name in self._stored:
            return f"{self.files.files[self._stored[name]]}: {self._stored[name]}"
        names = [stored for names in self._conversions[name].sources.values() for stored in names]
        return f"{self.files.files[names[0]].parent}: {name}, converted from {names[0]} and {len(names) - 1} more,"

    def _find(self, stored: dict[str, tuple[int, ...]]) -> list[Conversion]:
        """Rename the stored tensors as from_pretrained() does, and return the conversions for those that need more."""
        known, prefix = self.model.state_dict(keep_vars=True), self.model.base_model_prefix
        mapping = get_model_conversion_mapping(self.model)
        renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
        converters = [step for step in mapping if isinstance(step, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        conversions: dict[str, Conversion] = {}
        for original in sorted(stored, key=dot_natural_key):
            name, pattern = rename_source_key(original, renamings, converters, prefix, known)
            if name not in known and original in known:
                name, pattern = rename_source_key(original, [], [], prefix, known)
            if pattern is not None and name in known:
                conversion = conversions.setdefault(name, Conversion(by_pattern[pattern], name))
                conversion.sources[pattern].append(original)
            else:
                self._stored.setdefault(name, original)
        return list(conversions.values())
