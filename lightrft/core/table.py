"""Pass a function the options that it names.

The keyword-only parameters of a function are options of the run, or data that the caller has. So
`ppo(logprobs, old_logprobs, advantages, *, eps_clip_low, eps_clip_high)` declares what it reads.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


@cache
def keywords(function: Callable[..., Any]) -> dict[str, bool]:
    """Return keyword-only parameter -> True if it is required."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def chosen(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the function names."""
    return {name: options[name] for name in keywords(function) if name in options}


def label(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages; a partial or an object has none."""
    return getattr(function, "__name__", repr(function))


def checked_options(function: Callable[..., Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options. Raises ValueError for one that the function does not name."""
    if unknown := sorted(options.keys() - keywords(function).keys()):
        names = ", ".join(keywords(function)) or "none"
        raise ValueError(f"{label(function)} has no option {', '.join(unknown)}; it has {names}")
    return options
