"""What a function is given beside its data: it names it.

The keyword-only parameters of an estimator or a loss are fields of the algorithm section, or data that the caller has; so
`ppo(logprobs, old_logprobs, advantages, *, eps_clip_low, eps_clip_high)` says which flags it reads, and a user's own too.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from typing import Any

from lightrft.config import AlgorithmSection
from lightrft.registry import Registry

FIELDS = {field.name for field in fields(AlgorithmSection)}
BOTH_BOUNDS = {"eps_clip": ("eps_clip_low", "eps_clip_high")}
"""A flag that sets several fields at once."""


@cache
def keywords(function: Callable[..., Any]) -> dict[str, bool]:
    """Keyword-only parameter -> whether it must be given."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def options(function: Callable[..., Any], section: AlgorithmSection, **given: Any) -> dict[str, Any]:
    """The keyword arguments of `function`: from `given`, else from the section, else its own defaults."""
    values = {name: getattr(section, name) for name in FIELDS} | given
    return {name: values[name] for name in keywords(function) if name in values}


def resolve(registry: Registry, name: str, given: Iterable[str] = ()) -> Callable[..., Any]:
    """The function of this name. ValueError where it must have what is neither a field of the section nor `given`."""
    function = registry[name]
    lacking = [keyword for keyword, needed in keywords(function).items() if needed and keyword not in FIELDS | set(given)]
    if lacking:
        raise ValueError(f"{registry.flag} {name} needs {', '.join(lacking)}, which this run does not make")
    return function


def unread(registry: Registry, chosen: str, written: set[str], companions: Registry | None = None) -> list[str]:
    """Flags that the user wrote and only other functions of the registry read, or their companions; each with the reason."""
    tables = [registry, companions] if companions else [registry]
    reads = {
        name: set().union(*(keywords(table[name]) for table in tables if table is registry or name in table)) & FIELDS
        for name in {*registry.names(), chosen}
    }
    for flag, of in BOTH_BOUNDS.items():
        for names in reads.values():
            names |= {flag} if names & set(of) else set()
    wasted = written & set().union(*reads.values()) - reads[chosen]
    return [f"--{name} has no effect with {registry.flag} {chosen}" for name in sorted(wasted)]
