"""A library's engine starts: whether its version was tested, and why it does not start, in the words of flags."""

from collections.abc import Iterator
from contextlib import contextmanager

from loguru import logger
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lightrft.engine.base import EngineError, EngineSetup
from lightrft.versions import ENGINES

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


def warn_if_untested(name: str, version: str) -> None:
    """Of the engine's library, as it says itself."""
    if not SpecifierSet(ENGINES[name]).contains(Version(version).base_version):
        logger.warning("{} {} is outside the tested range, {}", name, version, ENGINES[name])
