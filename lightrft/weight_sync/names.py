"""What weights are called, and how they are cut, in the folders that models are published in.

transformers renames, fuses and turns the weights of some families when it loads them: the experts of a layer become one tensor,
a vision tower moves below `model.`. Trainers, checkpoints, adapters and the weight stream speak of parameters as transformers
has them. Engines and folders know them as they are published, so whatever goes there passes through here: by transformers' own
way back, the one of save_pretrained, for a few weights at a time.
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
from transformers.core_model_loading import Transpose, WeightConverter, WeightTransform, revert_weight_conversion

from lightrft.weight_sync.stream import NamedTensor


class PublishedNames:
    """Of one transformers model. Most families are published under the names that transformers has for them."""

    def __init__(self, model: PreTrainedModel):
        """`model` as its class makes it, neither distributed nor adapted; it may be empty, and is kept."""
        self._model = model
        model._weight_conversions = _conversions(model)
        stored = model.state_dict(keep_vars=True)
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        """transformers' name -> full shape of what one weight stream brings: parameters, tied ones once, persistent buffers."""
        self.shapes |= {name: buffer.shape for name, buffer in model.named_buffers() if name in stored}
        self.renamed: dict[str, str] = {}
        """transformers' name -> published name of each weight that is the same tensor in both."""
        self._together: dict[str, list[str]] = {}
        """The others: name -> those that have to be there to make what is published, mostly itself alone."""
        self._find({name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()})

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Of a model that may be distributed and adapted: read from an empty one of its class."""
        with torch.device("meta"):
            return cls(made_as(model)(copy.deepcopy(model.config)))

    def published(self, stream: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """A weight stream under published names. Nothing is held but weights that become one together, until all have come."""
        held: dict[str, Tensor] = {}
        for name, tensor in stream:
            members = self._together.get(name)
            if members is None:
                yield self.renamed.get(name, name), tensor
                continue
            held[name] = tensor
            if held.keys() >= set(members):
                yield from self._convert({member: held.pop(member) for member in members}).items()

    def pieces(self, name: str) -> list[str]:
        """Published names of what becomes of a weight, alone or together with others."""
        if name in self.renamed:
            return [self.renamed[name]]
        return list(self._convert({member: torch.empty(self.shapes[member], device="meta") for member in self._together[name]}))

    def is_alone(self, name: str) -> bool:
        """Whether what is published of a weight is made of it alone."""
        return name in self.renamed or self._together[name] == [name]

    def strangers(self, names: list[str], engine: str) -> str:
        """What to say, and to do, when an engine has no place for `names`."""
        first = ", ".join(f"{name} (published as {self.pieces(name)[0]})" for name in names[:3])
        return (
            f"{engine} has no place for {len(names)} of the {len(self.shapes)} weights of {type(self._model).__name__}, such as "
            f"{first}. It may do without; if not, another version of it may take them, and --engine_type hf does; and if folders "
            "of this model call them otherwise, say so with transformers' register_checkpoint_conversion_mapping()"
        )

    def _find(self, weights: dict[str, Tensor]) -> None:
        of = {id(tensor): name for name, tensor in weights.items()}
        self.renamed = {of[id(tensor)]: name for name, tensor in self._convert(weights).items() if id(tensor) in of}
        makers: dict[str, list[str]] = defaultdict(list)
        for name in weights.keys() - self.renamed.keys():
            makers[min(self._convert({name: weights[name]}))].append(name)
        self._together = {name: sorted(members) for members in makers.values() for name in members}

    def _convert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return revert_weight_conversion(self._model, weights)


def made_as(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class that transformers knows; sharding puts one of its own in front of it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """What transformers does with the published folder of such a model, whatever folder this one is from.

    A model and the part of it that has no head may both have one and the same renaming (Qwen2-Audio): what the first has renamed
    the second never finds, but on the way back both would be taken.
    """
    first: dict[tuple, WeightTransform] = {}
    for conversion in get_model_conversion_mapping(model, add_legacy=False):
        first.setdefault((type(conversion), *conversion.source_patterns), conversion)
    conversions = list(first.values())
    for conversion in conversions:
        for operation in conversion.operations if isinstance(conversion, WeightConverter) else ():
            if isinstance(operation, Transpose):
                operation.check_dims = False  # it asks whether a folder is turned; published ones are
    return conversions
