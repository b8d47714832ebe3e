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
