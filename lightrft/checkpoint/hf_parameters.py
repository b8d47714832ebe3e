"""Find parameters by their Hugging Face names, whatever role wraps the model."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from transformers import PreTrainedModel


@runtime_checkable
class HasHFParameters(Protocol):
    """Module of a role that knows the Hugging Face names of its parameters."""

    def hf_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter), tied ones once."""


def hf_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of a transformers model or a role, tied ones once.

    Raise TypeError for any other module.
    """
    if isinstance(model, PreTrainedModel):
        return model.named_parameters()
    if isinstance(model, HasHFParameters):
        return model.hf_parameters()
    raise TypeError(
        f"{type(model).__name__} is not a transformers model and has no hf_parameters()"
    )


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) of the buffers that are saved with the model's weights."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def unwrap(model: nn.Module) -> nn.Module:
    """Return the first transformers model inside `model`, or `model` if there is none.

    The first may be `model` itself.
    """
    return next(
        (module for module in model.modules() if isinstance(module, PreTrainedModel)), model
    )
