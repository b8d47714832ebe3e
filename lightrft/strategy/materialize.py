"""Memory for empty models, after they were sharded: each rank reads its own part of every tensor, and no more."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightrft.models.empty import is_empty
from lightrft.models.weight_files import WeightFiles, is_backbone, missing_and_unexpected, stored_tensors, tied_names
from lightrft.parallel.collectives import Axis
from lightrft.parallel.cuts import own_part
from lightrft.strategy.atomic import agree
from lightrft.strategy.named import unwrap


def materialize(module: nn.Module, device: torch.device, world: Axis) -> None:
    """Fill what is empty in `module` from the Hugging Face folder that its model names; what has memory keeps its values.

    CheckpointError on all ranks when a tensor is missing there, has another shape, or is not of the model.
    """
    if not is_empty(module):
        return
    model = _source(module)
    tensors = stored_tensors(model)
    wanted = [names for names in tied_names(model) if tensors[names[0]].is_meta or not _is_parameter(tensors[names[0]])]
    kept = {name: tensor.clone() for name, tensor in _local_tensors(module) if not tensor.is_meta}
    module.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in _local_tensors(module):
            if name in kept:
                tensor.copy_(kept[name])
        agree(world, f"{model.name_or_path} could not be loaded", partial(_read, model, wanted))


def _source(module: nn.Module) -> PreTrainedModel:
    """The model inside, which knows where its weights are. ValueError when that cannot be all that is needed."""
    model, outside = unwrap(module), "make it outside of init_model_context()"
    if not isinstance(model, PreTrainedModel) or not model.name_or_path:
        raise ValueError(f"{type(module).__name__} is empty and names no folder to be filled from: {outside}")
    inside = {id(parameter) for parameter in model.parameters()}
    for name, parameter in module.named_parameters():
        if parameter.is_meta and id(parameter) not in inside:
            raise ValueError(f"{name} is empty and no part of {type(model).__name__}: {outside}")
    return model


def _read(model: PreTrainedModel, wanted: list[list[str]]) -> None:
    """Groups of tied names, each of which is one tensor and stored under at least one of them."""
    files = WeightFiles.of(model.name_or_path)
    if files is None:
        raise FileNotFoundError("it has no safetensors files")
    missing, unexpected = missing_and_unexpected(model, files.files)
    missing &= {name for names in wanted for name in names}
    unexpected = {name for name in unexpected if is_backbone(model, name)}
    for names, what in ((missing, "of the model are not in it"), (unexpected, "in it are not of the model")):
        if names:
            raise ValueError(f"{len(names)} tensors {what}, the first is {min(names)}")
    tensors = stored_tensors(model)
    for names in wanted:
        tensor = tensors[names[0]]
        stored = next(name for name in names if name in files.files)
        _local(tensor).copy_(files.read(stored, tuple(tensor.shape), own_part(tensor)))


def _local_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, this rank's part) of parameters and all buffers."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield name, _local(tensor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)
