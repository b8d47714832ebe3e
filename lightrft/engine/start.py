"""Start a library's engine: check the version, and name the flags behind errors."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from loguru import logger
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from transformers import PretrainedConfig

from lightrft.config.errors import ConfigError
from lightrft.config.values import nearest
from lightrft.core.engine import Request
from lightrft.core.samples import Expanded
from lightrft.engine.base import Engine, EngineError, EngineSetup
from lightrft.engine.media import MediaReader
from lightrft.engine.model_info import (
    Vocabulary,
    draft_names,
    media_limits,
    published_names,
    with_prefix,
)
from lightrft.models.qwen_omni import load_config
from lightrft.versions import ENGINE_VERSIONS

MEMORY_ADVICE = (
    "If memory is the cause: --engine_mem_util is the engine's share of an accelerator,"
    " --engine_kv_cache_gb its cache on a CPU, --prompt_max_len + --generate_max_len its longest"
    " sequence, and --engine_tp_size ranks share one engine's weights."
)


class FolderEngine(Engine):
    """Engine of a model's folder, to which weights come by published names."""

    def __init__(self, setup: EngineSetup):
        """Read what the folder says about the model."""
        trust = {"trust_remote_code": setup.trust_remote_code}
        self.config = load_config(setup.model_path, **trust)
        self.names = published_names(self.config, **trust)
        self.draft_names = draft_names(setup.section, **trust) if setup.streams_draft else None
        """Names of the weights of --draft_pretrain, if streams bring them."""
        quantization = None
        if setup.section.rollout_quantization != "none":
            from lightrft.models.weight_sync.quantized import Quantization

            # It adds scales to the names.
            quantization = Quantization(setup.section.rollout_quantization, self.names, setup.dtype)
        streamed = self.names.shapes | (with_prefix(self.draft_names) if self.draft_names else {})
        super().__init__(
            streamed,
            sleep_level=setup.section.engine_sleep_level,
            axis=setup.axis,
            max_model_len=setup.max_model_len,
            vocabulary=Vocabulary.of(setup.model_path, self.config, **trust),
            adapters=setup.adapters,
        )
        self.quantization = quantization
        most_of_media = media_limits(setup.section, self.config)
        self.model_reads = tuple(most_of_media)
        self.limits = {name: most for name, most in most_of_media.items() if name in self.media}
        self.reader = MediaReader(setup.model_path, self.vocabulary.placeholders, **trust)
        self.device = setup.device

    def _expanded(self, request: Request) -> Expanded:
        return self.reader.expand(request)


class LibraryEngine(FolderEngine):
    """Engine of a library that reads the model's folder itself."""

    def __init__(self, library: str, version: str, setup: EngineSetup):
        """Start the engine; `version` is reported by the library.

        All ranks construct and close engines together.
        """
        warn_if_untested(library, version)
        super().__init__(setup)
        self.on_cpu = setup.device.type == "cpu"
        with starting(library, setup):
            unknown = self._start(setup, self.config)

        if unknown:
            names = self.names.unknown_weights_message(unknown, library)
            logger.warning("--verify_weight_sync skips weights that it cannot find: {}", names)

        self.weights_valid = not setup.from_stream

    @abstractmethod
    def _start(self, setup: EngineSetup, config: PretrainedConfig) -> list[str]:
        """Start the library's engine; return the expected weights that were not found in it."""


@contextmanager
def starting(name: str, setup: EngineSetup) -> Iterator[None]:
    """Convert errors of the library's start.

    It becomes ValueError if the library rejects the arguments, and EngineError for other failures.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        message = (
            f"--engine_type {name} does not start with {setup.model_path}: {type(error).__name__}:"
            f" {error}\n{MEMORY_ADVICE}"
        )
        raise (
            ValueError(message) if isinstance(error, ValueError) else EngineError(message)
        ) from error


def with_users_arguments(
    arguments: dict[str, Any], text: str, *, known: Iterable[str], reserved: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments of a library's engine, updated with the JSON object of --engine_args.

    An argument that is a mapping is updated by key. Raises ConfigError for a name that is not
    `known`, and for one that is `reserved`: name -> what to do instead.
    """
    users = json.loads(text or "{}")
    known = set(known)
    problems = [f"{name}: {reserved[name]}" for name in users if name in reserved]
    problems += [
        f"{name}: the engine has no such argument{nearest(name, known - reserved.keys())}"
        for name in users
        if name not in known
    ]
    if problems:
        raise ConfigError("".join(f"--engine_args {problem}\n" for problem in problems).strip())

    for name, value in users.items():
        default = arguments.get(name)
        both = isinstance(default, dict) and isinstance(value, dict)
        users[name] = default | value if both else value
    return arguments | users


def warn_if_untested(name: str, version: str) -> None:
    """Log a warning if the library's version is outside of the tested range."""
    if not SpecifierSet(ENGINE_VERSIONS[name]).contains(Version(version).base_version):
        logger.warning(
            "{} {} is outside the tested range, {}", name, version, ENGINE_VERSIONS[name]
        )
