"""Call a function in the environment that has SGLang, and torchvision.

It lies over the tests' own environment, beside its folder.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hosts import answer_of


def in_sglang_environment(
    function: Callable[..., Any], *args: Any, timeout: float = 600, spawns: bool = False
) -> Any:
    """Run `function(*args)` in a fork of a process of that environment: see answer_of().

    That process has imported SGLang; ranks are forked from there. SGLang's own processes are forked
    from it too, or with `spawns` started afresh, as they are for users. A call of the stand-in for
    SGLang's kernels raises RuntimeError.
    """
    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder) / "stand_in_calls"
        environment = {"STAND_IN_CALLS": str(calls)}
        result = answer_of("sglang", Path(folder), environment, spawns, function, args, timeout)
        if calls.exists():
            raise RuntimeError(f"the stand-in for SGLang's kernels was called: {calls.read_text()}")
        return result


def beside_torchvision(function: Callable[..., Any], *args: Any, timeout: float = 600) -> Any:
    """Run `function(*args)` in a fork of another process of that environment: see answer_of().

    It has imported torchvision and vLLM instead of SGLang.
    """
    with tempfile.TemporaryDirectory() as folder:
        return answer_of("vllm", Path(folder), {}, True, function, args, timeout)
