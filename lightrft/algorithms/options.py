"""Pass a function the flags of the algorithm section that it names; see core/table.py."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from lightrft.config.sections import AlgorithmSection
from lightrft.core.table import chosen, keywords
from lightrft.registry import Registry

FIELDS = {field.name for field in fields(AlgorithmSection)}


def options_of(function: Callable[..., Any], section: AlgorithmSection) -> dict[str, Any]:
    """Return the keyword arguments of `function` that are fields of the section."""
    return chosen(function, {name: getattr(section, name) for name in FIELDS})


def resolve(registry: Registry, name: str, extra: Iterable[str] = ()) -> Callable[..., Any]:
    """Return the function of this name.

    Raises ValueError if it requires a parameter that is neither a field of the section nor `extra`.
    """
    function = registry[name]
    missing = [
        keyword
        for keyword, needed in keywords(function).items()
        if needed and keyword not in FIELDS | set(extra)
    ]
    if missing:
        raise ValueError(
            f"{registry.flag} {name} needs {', '.join(missing)}, which this run does not compute"
        )

    return function
