"""Find modules of a kind that are inside of no other one."""

from collections.abc import Iterator
from typing import TypeVar

from torch import nn

Module = TypeVar("Module")


def outermost(module: nn.Module, kind: type[Module]) -> Iterator[Module]:
    """Yield the modules of a class inside `module` that are in no other of this class."""
    if isinstance(module, kind):
        yield module
    else:
        for child in module.children():
            yield from outermost(child, kind)
