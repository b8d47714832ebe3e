"""Models whose parameters have a shape and no memory yet, so that one of any size is made in an instant on every rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

Register = Callable[[nn.Module, str, nn.Parameter | None], None]
_register_real: Register = nn.Module.register_parameter


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Parameters of modules made inside are on the meta device. Buffers, which only the constructor knows, are real."""
    with _registering(_register_empty):
        yield


@contextmanager
def real_parameters() -> Iterator[None]:
    """An island inside empty_parameters(), where modules are made as ever."""
    with _registering(_register_real):
        yield


def makes_empty() -> bool:
    """Whether this is inside empty_parameters()."""
    return nn.Module.register_parameter is _register_empty


def is_empty(module: nn.Module) -> bool:
    """Whether any parameter of `module` has no memory."""
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
    """One that is empty stays the same object: tied parameters stay tied."""
    if parameter is not None and not parameter.is_meta:
        parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    _register_real(module, name, parameter)
