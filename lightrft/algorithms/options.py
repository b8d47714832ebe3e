"""What a function is given beside its data: it names it.

The keyword-only parameters of an estimator or a loss are fields of the algorithm section, or data that the caller has; so
`ppo(logprobs, old_logprobs, advantages, *, eps_clip_low, eps_clip_high)` says which flags it reads, and a user's own too.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from lightrft.config import AlgorithmSection
from lightrft.registry import Registry

FIELDS = {field.name for field in fields(AlgorithmSection)}


def keywords(function: Callable[..., Any]) -> dict[str, bool]:
    """Keyword-only parameter -> whether it must be given."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def options(function: Callable[..., Any], section: AlgorithmSection, **given: Any) -> dict[str, Any]:
    """The keyword arguments of `function`: from `given`, else from the section, else its own defaults."""
    values = {name: getattr(section, name) for name in FIELDS} | given
    return {name: values[name] for name in keywords(function) if name in values}


def missing(function: Callable[..., Any], given: Iterable[str] = ()) -> list[str]:
    """What a function must be given and is neither a field of the section nor `given`."""
    return [name for name, needed in keywords(function).items() if needed and name not in FIELDS | set(given)]


def unread(registry: Registry, chosen: str, written: set[str]) -> list[str]:
    """Flags that the user wrote and only other functions of the registry read, each with the reason."""
    known = set().union(*(keywords(registry[name]) for name in registry.names())) & FIELDS
    wasted = known & written - keywords(registry[chosen]).keys()
    return [f"--{name} has no effect with {registry.flag} {chosen}" for name in sorted(wasted)]
