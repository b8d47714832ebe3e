"""Models whose parameters have shapes but no memory yet.

A model of any size is built instantly on every rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

Register = Callable[[nn.Module, str, nn.Parameter | None], None]
_register_real: Register = nn.Module.register_parameter


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Create the parameters of new modules on the meta device.

    Buffers are real, because only the constructor can compute them.
    """
    with _registering(_register_empty):
        yield


@contextmanager
def real_parameters() -> Iterator[None]:
    """Create modules with real parameters again, inside empty_parameters()."""
    with _registering(_register_real):
        yield


def makes_empty() -> bool:
    """Return True inside empty_parameters()."""
    return nn.Module.register_parameter is _register_empty


def is_empty(module: nn.Module) -> bool:
    """Return True if any parameter of `module` has no memory."""
    return any(parameter.is_meta for parameter in module.parameters())


@contextmanager
def _registering(register: Register) -> Iterator[None]:
    before = nn.Module.register_parameter
    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = before


def _register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Register the parameter on the meta device.

    A parameter already there stays the same object, so tied ones stay tied.
    """
    if parameter is not None and not parameter.is_meta:
        parameter = nn.Parameter(
            parameter.detach().to("meta"), requires_grad=parameter.requires_grad
        )
        parameter._is_hf_initialized = True  # transformers would draw values for it
    _register_real(module, name, parameter)
