"""Prepare the configuration of a run.

The command line, Python, and a trainer built by hand do it in the same way.
"""

import os
import warnings

from loguru import logger
from transformers.utils import logging as transformers_logging

from lightrft.algorithms.unread import unread_flags
from lightrft.config.errors import ConfigError
from lightrft.config.references import MODEL_KEY, REWARD_KEY
from lightrft.config.resolve import resolve
from lightrft.config.sections import Config
from lightrft.config.summary import summary
from lightrft.models.launch.rendezvous import adopt_slurm, check_launched, ranks_per_node
from lightrft.models.parallel.device import device_name, has_bf16
from lightrft.strategy.checkpoint.model_folders import name_folders
from lightrft.versions import check_versions


def prepare_config(command: str, config: Config) -> Config:
    """Resolve and check `config` in place, and log the warnings and the plan of the run.

    A configuration is prepared only once. Models in GGUF files are converted first, so that
    everything else only knows folders and hub names. Raises ConfigError with everything that cannot
    run.
    """
    if config.command == command:
        return config

    adopt_slurm(os.environ)
    check_launched(os.environ)
    try:
        notices = check_versions()
        name_folders(config)
        notices += resolve(config, command, has_bf16=has_bf16())
        notices += slow_float32(config) + unprotected_server(config, command)
        notices += unread_flags(config.algorithm) if command == "train_ppo" else []
    except ValueError as error:
        raise ConfigError(str(error)) from error

    # Nodes may have other versions installed, so each logs what it has found.
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        for notice in notices:
            logger.warning(notice)

    if int(os.environ.get("RANK", 0)) == 0:
        for line in summary(
            config, command, int(os.environ.get("WORLD_SIZE", 1)), ranks_per_node(os.environ)
        ):
            logger.info(line)

    return config


def slow_float32(config: Config) -> list[str]:
    """Return a warning if a GPU computes in float32 and nobody asked for that."""
    name = device_name()
    if not name or config.model.bf16 or "bf16" in config.written:
        return []
    if has_bf16():
        return ["--zero_stage 0 computes in float32, several times slower: 1, 2 and 3 use bfloat16"]
    return [f"{name} has no fast bfloat16, so that everything is computed in float32, slowly"]


def unprotected_server(config: Config, command: str) -> list[str]:
    """Return a warning if other machines can reach a server that asks for no key."""
    key = {"serve": MODEL_KEY, "tinker": MODEL_KEY, "serve_reward": REWARD_KEY}.get(command, "")
    host = config.server.host
    if not key or os.environ.get(key) or host in ("localhost", "::1") or host.startswith("127."):
        return []
    return [f"--host {host} without a key: whoever reaches the port can use the server; set {key}"]


def quiet_libraries() -> None:
    """Silence log messages of libraries that users cannot act on."""
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*_tensor` is deprecated", category=FutureWarning)
    # one process is enough
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
