"""Fill empty models with weights from a Hugging Face folder, with minimal peak memory."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.models import weight_files
from lightrft.models.converted_files import ConvertedFiles
from lightrft.models.empty import is_empty
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.device import local_tensor
from lightrft.models.parallel.dtensor_slices import local_slices
from lightrft.models.weight_sync.names import transformers_class
from lightrft.models.weight_sync.stream import unwrap
from lightrft.strategy.backends.offload import same_parameters
from lightrft.strategy.checkpoint.atomic import run_on_all_ranks


def materialize(module: nn.Module, device: torch.device, world: Axis) -> None:
    """Load this rank's part of each empty tensor of a sharded module.

    Tensors that have memory are left alone. Raises CheckpointError on all ranks if a tensor is
    missing in the folder, has a different shape, is not in the model, or is not finite.
    """
    if not is_empty(module):
        return

    source = Source.of(module, world)
    # to_empty() would overwrite tensors that have memory already, so their values are kept aside.
    materialized = {
        name: tensor.clone() for name, tensor in _local_tensors(module) if not tensor.is_meta
    }
    with same_parameters():
        module.to_empty(device=device)

    with torch.no_grad():
        for name, tensor in _local_tensors(module):
            if name in materialized:
                tensor.copy_(materialized[name])
        run_on_all_ranks(world, source.failure, partial(source.fill, source.stored_names))


def one_by_one(module: nn.Module, dtype: torch.dtype, world: Axis) -> Iterator[nn.Parameter]:
    """Yield every parameter of an unsharded module, whole and in `dtype`.

    An empty parameter is loaded only when it is yielded: rank 0 has the values, the other ranks
    only the memory. All empty parameters share one buffer, so each must be partitioned before the
    next is requested. A new parameter replaces each empty one; call follow() for the optimizer of
    `module` afterwards. Raises the errors of materialize().
    """
    source = Source.of(module, world)
    buffers = [name for name, _ in source.model.named_buffers() if name in source.stored_names]
    run_on_all_ranks(world, source.failure, partial(source.fill, buffers))

    holders = defaultdict(list)
    # Several modules hold tied parameters, and all of these get the new object.
    for submodule in module.modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            holders[parameter].append((submodule, name))

    parameters = list(module.parameters())
    buffer = torch.empty(
        max(parameter.numel() for parameter in parameters if parameter.is_meta), dtype=dtype
    )
    for parameter in parameters:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(dtype)
        else:
            materialized = nn.Parameter(
                buffer[: parameter.numel()].view(parameter.shape),
                requires_grad=parameter.requires_grad,
            )
            if world.rank == 0:
                source.read(parameter, materialized.data)
            for submodule, name in holders[parameter]:
                submodule.register_parameter(name, materialized)
            parameter = materialized

        yield parameter


@dataclass(frozen=True, slots=True)
class Source:
    """Weight files of a model, and the names of the tensors in them."""

    model: PreTrainedModel
    files: ConvertedFiles
    stored_names: dict[str, str]
    """Name in the model -> name in the files, for each tensor to read. The files may have a tied
    tensor under another name."""
    quantized: dict[str, Any]
    """Name in the model -> layer whose matrix is quantized when it is read."""
    failure: str
    """What errors say that reading ends with."""

    @classmethod
    def of(cls, module: nn.Module, world: Axis) -> Self:
        """Locate the files of a module; ValueError if no folder has all the weights."""
        model = _model_inside(module)
        quantized = _quantized(model)
        failure = f"{model.name_or_path} could not be loaded"
        located = run_on_all_ranks(world, failure, lambda: _locate(model, quantized))
        return cls(model, *located, quantized, failure)

    def fill(self, names: Iterable[str]) -> None:
        """Load this rank's shard of each of these tensors."""
        tensors = weight_files.stored_tensors(self.model)
        with torch.no_grad():
            for name in names:
                self._read(name, tensors[name], local_tensor(tensors[name].detach()))

    def read(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Load the whole value of an empty parameter into `values`, in that dtype."""
        tensors = weight_files.stored_tensors(self.model).items()
        name = next(name for name, other in tensors if other is parameter)
        self._read(name, parameter, values)

    def _read(self, name: str, tensor: Tensor, values: Tensor) -> None:
        """Load this rank's shard of a tensor into `values`.

        ValueError for a weight, but not for a buffer, that is not finite.
        """
        stored = self.stored_names[name]
        if name in self.quantized:
            self._quantize(stored, self.quantized[name], tensor, values)
            return
        for index, piece in self.files.read(stored, local_slices(tensor)):
            if isinstance(tensor, nn.Parameter):
                weight_files.check_finite(self.files.origin(stored), piece)
            values[index].copy_(piece)

    def _quantize(self, stored: str, layer: Any, tensor: Tensor, values: Tensor) -> None:
        """Read a whole matrix, quantize it on the device, and keep this rank's shard of the bytes.

        The mean of its scales depends on all rows.
        """
        shape = self.files.shapes[stored]
        matrix = torch.empty(shape, device=values.device)
        for index, piece in self.files.read(stored, tuple(slice(0, size) for size in shape)):
            weight_files.check_finite(self.files.origin(stored), piece)
            matrix[index].copy_(piece)
        values.copy_(layer.pack(matrix)[local_slices(tensor)])


def _quantized(model: PreTrainedModel) -> dict[str, Any]:
    """Return the layers in four bits by the names of their weights; they alone have bytes."""
    if all(parameter.dtype != torch.uint8 for parameter in model.parameters()):
        return {}
    from lightrft.models.four_bits.linear import quantized_layers

    return quantized_layers(model)


def _locate(
    model: PreTrainedModel, quantized: dict[str, Any]
) -> tuple[ConvertedFiles, dict[str, str]]:
    """Return the files of a model, and the name in them of each tensor to read.

    The first of several tied names represents all of them. Raises ValueError if the files do not
    match the model.
    """
    files = weight_files.WeightFiles.of(model.name_or_path)
    if files is None:
        raise FileNotFoundError("it has no safetensors files")

    with torch.device("meta"):
        converted = ConvertedFiles(transformers_class(model)(copy.deepcopy(model.config)), files)
    tensors = weight_files.stored_tensors(model)
    groups = [
        names
        for names in weight_files.tied_names(model)
        if tensors[names[0]].is_meta or not isinstance(tensors[names[0]], nn.Parameter)
    ]
    missing, unexpected = weight_files.missing_and_unexpected(model, converted.shapes)

    # Tensors that are not read may be missing, and heads of other models may be there.
    missing &= {name for names in groups for name in names}
    unexpected = {name for name in unexpected if weight_files.is_backbone(model, name)}
    weight_files.refuse_tensors(missing, "of the model are not in it")
    weight_files.refuse_tensors(unexpected, "in it are not of the model")

    stored_names = {
        names[0]: next(name for name in names if name in converted.shapes) for names in groups
    }
    for name, stored in stored_names.items():
        layer = quantized.get(name)
        expected = tensors[name].shape
        if layer is not None:
            expected = (layer.out_features, layer.in_features)
        converted.check_shape(stored, expected)

    return converted, stored_names


def _model_inside(module: nn.Module) -> PreTrainedModel:
    """Return the transformers model, whose `name_or_path` is the folder to read.

    Raises ValueError without a folder, or if an empty parameter is outside of that model.
    """
    model = unwrap(module)
    outside = "make it outside of init_model_context()"
    if not isinstance(model, PreTrainedModel) or not model.name_or_path:
        raise ValueError(
            f"{type(module).__name__} is empty and names no folder to be filled from: {outside}"
        )

    inside = {id(parameter) for parameter in model.parameters()}
    for name, parameter in module.named_parameters():
        if parameter.is_meta and id(parameter) not in inside:
            raise ValueError(f"{name} is empty and no part of {type(model).__name__}: {outside}")

    return model


def _local_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, this rank's shard) of parameters and all buffers."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield name, local_tensor(tensor.detach())
