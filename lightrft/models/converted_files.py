"""Safetensors files under the names and in the shapes that a model of transformers has, whatever they are called there.

Folders are published with a tensor for each expert; transformers has those of a layer in one. from_pretrained() converts the
whole model. Here a tensor is converted when it is read, from the parts that are needed, by transformers' own conversions.
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
    """Stored tensors that together become one tensor of the model, or several."""

    converter: WeightConverter
    target: str
    """The first tensor that is made, by which transformers finds the names of the others."""
    sources: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Pattern of the converter -> stored names, in the order of their numbers."""

    @property
    def stacks(self) -> bool:
        """Whether rows of what is made come from stored tensors of the same places, one each: experts in their order."""
        first, *others = self.converter.operations
        merges = isinstance(first, MergeModulelist) and first.dim == 0
        return merges and all(isinstance(other, Concatenate) and other.dim > 0 for other in others)

    def convert(self, model: PreTrainedModel, tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """Return what becomes of the tensors, by name in the model. `tensors` is emptied. ValueError where nothing can."""
        converter = copy.deepcopy(self.converter)
        converter.collected_tensors = tensors
        try:
            converted = converter.convert(self.target, model=model, config=model.config)
        except (RuntimeError, ValueError, LookupError) as error:
            raise ValueError(f"transformers cannot make {self.target} of what is stored ({error})") from error
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}


class ConvertedFiles:
    """The tensors of a folder as they are in a model; a name that the model does not know is here, too."""

    def __init__(self, model: PreTrainedModel, files: WeightFiles):
        """`model` as its class makes it, neither distributed nor adapted; it may be empty. Headers alone are read."""
        self.model, self.files = model, files
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name in the model -> shape of all of the tensor."""
        self._stored: dict[str, str] = {}
        """Name in the model -> stored name of what is stored as it is."""
        self._conversions: dict[str, Conversion] = {}
        """Name in the model -> how it is made."""
        stored = files.shapes()
        for conversion in self._find(stored):
            sources = {pattern: [torch.empty(stored[name], device="meta") for name in names]
                       for pattern, names in conversion.sources.items()}  # fmt: skip
            for name, tensor in conversion.convert(model, sources).items():
                self._conversions[name], self.shapes[name] = conversion, tuple(tensor.shape)
        self.shapes |= {name: stored[stored_name] for name, stored_name in self._stored.items()}

    def read(self, name: str, part: Part) -> Tensor:
        """Return this part of a tensor, on the host and in the stored dtype. Of the experts of a layer no others are read."""
        if name in self._stored:
            return self.files.read(self._stored[name], part)
        conversion, rows = self._conversions[name], slice(None)
        if conversion.stacks:
            count = part[0].stop - part[0].start
            rows = part[0] if count else slice(1)  # nothing cannot be stacked: one is read, and none of it taken
            part = (slice(count), *part[1:])
        sources = {pattern: self.files.read_all(names[rows]) for pattern, names in conversion.sources.items()}
        return conversion.convert(self.model, sources)[name][part]

    def origin(self, name: str) -> str:
        """Return where a tensor is stored, for errors."""
        if name in self._stored:
            return f"{self.files.files[self._stored[name]]}: {self._stored[name]}"
        names = [stored for names in self._conversions[name].sources.values() for stored in names]
        return f"{self.files.files[names[0]].parent}: {name}, made of {names[0]} and {len(names) - 1} more,"

    def _find(self, stored: dict[str, tuple[int, ...]]) -> list[Conversion]:
        """Rename what is stored, as from_pretrained() does, and return the conversions of what is more than renamed."""
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
