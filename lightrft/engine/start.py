"""Why a library's engine does not start, in the words of this program's flags."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightrft.engine.base import EngineError, EngineSetup

MEMORY = (
    "If it is memory: --engine_mem_util is the engine's share of an accelerator, --engine_kv_cache_gb its cache on a CPU, "
    "--prompt_max_len + --generate_max_len its longest sequence, and --engine_tp_size ranks share one engine's weights."
)


@contextmanager
def starting(name: str, setup: EngineSetup) -> Iterator[None]:
    """Around the library's own start: ValueError where it refuses what it was given, EngineError where it breaks."""
    try:
        yield
    except Exception as error:
        said = f"--engine_type {name} does not start with {setup.model_path}: {type(error).__name__}: {error}\n{MEMORY}"
        raise (ValueError(said) if isinstance(error, ValueError) else EngineError(said)) from error
