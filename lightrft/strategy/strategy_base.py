"""The module where StrategyBase was."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(import_module("lightrft.compat.strategy"), name)
