"""Names and shapes of weights as in the folders that models are published in.

transformers renames, fuses and transposes the weights of some families when it loads them: the
experts of a layer become one tensor, a vision tower moves below `model.`. Trainers, checkpoints,
adapters and the weight stream use the names of transformers. Engines and folders use the published
names. This module converts weights back for them, a few at a time, with the reverse conversion that
transformers uses in save_pretrained.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Self

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Transpose,
    WeightConverter,
    WeightTransform,
    revert_weight_conversion,
)

NamedTensor = tuple[str, Tensor]
DRAFT = "draft:"
"""Prefix, in a weight stream, of the names of the model that drafts for the engine.

Its weights follow the actor's.
"""
SCALE = ".weight_scale"
"""End, in a quantised weight stream, of the names of the scales of a matrix."""


class PublishedNames:
    """Published names of the weights of one transformers model.

    For most families they are the names of transformers.
    """

    def __init__(self, model: PreTrainedModel):
        """Find the published names.

        `model` must be neither distributed nor adapted; it may be empty, and is kept.
        """
        self.model = model
        model._weight_conversions = _conversions(model)
        stored = model.state_dict(keep_vars=True)
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        """transformers name -> full shape of each tensor of a weight stream: parameters, tied ones
        once, and persistent buffers."""
        self.shapes |= {
            name: buffer.shape for name, buffer in model.named_buffers() if name in stored
        }
        self.renamed: dict[str, str] = {}
        """transformers name -> published name of each weight that is the same tensor in both."""
        self._together: dict[str, list[str]] = {}
        """For other weights: name -> names of all weights that are converted together. Usually it
        is only the weight itself."""
        self._find({name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()})

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Return the names for a model that may be distributed and adapted.

        They are determined with an empty model of the same class.
        """
        with torch.device("meta"):
            return cls(transformers_class(model)(copy.deepcopy(model.config)))

    def add(self, name: str, published: str, shape: tuple[int, ...]) -> None:
        """Add a tensor that streams bring besides the weights of the model."""
        self.shapes[name] = torch.Size(shape)
        self.renamed[name] = published

    def rename(self, stream: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield a weight stream under published names."""
        held: dict[str, Tensor] = {}
        for name, tensor in stream:
            yield from self.publish(name, tensor, held)

    def publish(self, name: str, tensor: Tensor, held: dict[str, Tensor]) -> Iterable[NamedTensor]:
        """Return what a weight of a stream becomes, under published names.

        Only weights that are converted together are held, in `held`, until all have arrived.
        """
        members = self._together.get(name)
        if members is None:
            return [(self.renamed.get(name, name), tensor)]

        held[name] = tensor
        if not held.keys() >= set(members):
            return []
        return self._convert({member: held.pop(member) for member in members}).items()

    def pieces(self, name: str) -> list[str]:
        """Return the published names of the tensors that a weight is converted to.

        It may be converted together with others.
        """
        if name in self.renamed:
            return [self.renamed[name]]
        members = self._together[name]
        empty = {member: torch.empty(self.shapes[member], device="meta") for member in members}
        return list(self._convert(empty))

    def is_alone(self, name: str) -> bool:
        """Return True if a weight is converted alone."""
        return name in self.renamed or self._together[name] == [name]

    def unknown_weights_message(self, names: list[str], engine: str) -> str:
        """Return an error message, with possible solutions, for weights that an engine lacks."""
        first = ", ".join(f"{name} (published as {self.pieces(name)[0]})" for name in names[:3])
        return (
            f"{engine} has no parameter for {len(names)} of the {len(self.shapes)} weights of"
            f" {type(self.model).__name__}, such as {first}. It may not need them. If it does, try"
            " another version of it, or use --engine_type hf, which supports them; if the folders"
            " of this model use other names, register these with transformers'"
            " register_checkpoint_conversion_mapping()"
        )

    def _find(self, weights: dict[str, Tensor]) -> None:
        of = {id(tensor): name for name, tensor in weights.items()}
        published = self._convert(weights).items()
        self.renamed = {of[id(tensor)]: name for name, tensor in published if id(tensor) in of}
        # Weights that become the same published tensor are converted together.
        makers: dict[str, list[str]] = defaultdict(list)
        for name in weights.keys() - self.renamed.keys():
            makers[min(self._convert({name: weights[name]}))].append(name)
        self._together = {name: sorted(members) for members in makers.values() for name in members}

    def _convert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return revert_weight_conversion(self.model, weights)


def transformers_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the model's class in transformers; sharding with FSDP replaces it by a subclass."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """Return the conversions of transformers for published folders of such a model.

    They do not depend on the folder that it was loaded from. A model and its backbone may both
    define the same renaming (Qwen2-Audio): in loading, the second one no longer finds a name that
    the first has renamed, but the reverse conversion would apply both.
    """
    first: dict[tuple, WeightTransform] = {}
    for conversion in get_model_conversion_mapping(model, add_legacy=False):
        first.setdefault((type(conversion), *conversion.source_patterns), conversion)
    conversions = list(first.values())
    for conversion in conversions:
        for operation in conversion.operations if isinstance(conversion, WeightConverter) else ():
            if isinstance(operation, Transpose):
                # it would check whether the folder's weights are transposed; published ones are
                operation.check_dims = False
    return conversions
