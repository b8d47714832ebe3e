"""A whole run in one call, the same for the command line and for Python (python.py)."""

import errno
import math
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from loguru import logger

from lightrft.app.run.interruption import Interrupted, Interruption
from lightrft.app.run.prepare import prepare_config, quiet_libraries
from lightrft.app.trainer.base import Trainer
from lightrft.app.trainer.build import evaluation, ppo_trainer
from lightrft.app.trainer.build_supervised import SUPERVISED_TASKS, supervised_trainer
from lightrft.config.errors import USER_ERROR, ConfigError
from lightrft.config.extras import extra
from lightrft.config.sections import Config
from lightrft.models.launch.heartbeat import exit_process, position
from lightrft.models.parallel.device import local_rank
from lightrft.registry import kept_alive
from lightrft.strategy import get_strategy
from lightrft.strategy.checkpoint.atomic import CheckpointError
from lightrft.strategy.strategy import StrategyBase

T = TypeVar("T")
NOTICE_SECONDS = 120.0
"""Seconds between two messages about a start that takes long."""

OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENAMETOOLONG)
"""Errors of the operating system of which one line says all."""


def run(command: str, config: Config) -> Any:
    """Resolve the configuration, set up the strategy, do the work of `command`, and clean up."""
    quiet_libraries()
    _start(prepare_config, command, config)

    strategy = _start(get_strategy, config)
    try:
        with kept_alive():
            _start(strategy.setup_distributed)
            return (
                _generate(strategy) if strategy.generates_only else WORK[command](config, strategy)
            )
    except KeyboardInterrupt as error:
        interrupted = Interrupted(*error.args or (signal.SIGINT,))
        strategy.fail(interrupted, code=interrupted.exit_code, brief=True)
        raise interrupted from None
    except Exception as error:
        if isinstance(error, CheckpointError) or getattr(error, "errno", None) in OF_THE_DISK:
            logger.opt(exception=error).debug("while writing the run's files")
            error = ConfigError(str(error))
        # The other ranks may wait in a collective for this one, so they end first. An interruption
        # ends all ranks by itself.
        of_the_user = isinstance(error, ConfigError)
        if not isinstance(error, Interrupted):
            strategy.fail(error, code=USER_ERROR if of_the_user else 1, brief=of_the_user)
        raise error
    finally:
        strategy.close()


def _train(
    build: Callable[[Config, StrategyBase], Trainer], config: Config, strategy: StrategyBase
) -> Trainer:
    trainer = _start(build, config, strategy)
    trainer.fit()
    return trainer


def _generate(strategy: StrategyBase) -> None:
    """Generate on a rank of --rollout_ranks until the ranks that train have ended.

    A signal to this rank waits, because the ranks that train decide when to stop.
    """
    with Interruption(strategy.mesh.world):
        _as_config_error(strategy.serve_engine)


def _evaluate(config: Config, strategy: StrategyBase) -> dict[str, float]:
    return _start(evaluation, config, strategy)()


def _serve(build: str, config: Config, strategy: StrategyBase) -> None:
    _start(getattr(extra("a server of models"), build), config, strategy).serve()


WORK: dict[str, Callable[[Config, StrategyBase], Any]] = {
    "train_ppo": partial(_train, ppo_trainer),
    **{name: partial(_train, partial(supervised_trainer, name)) for name in SUPERVISED_TASKS},
    "evaluate": _evaluate,
    "serve": partial(_serve, "model_server"),
    "serve_reward": partial(_serve, "reward_server"),
    "tinker": partial(_serve, "tinker_server"),
}


def _as_config_error(step: Callable[..., T], *arguments: object) -> T:
    """Do a step of the setup, and raise errors as ConfigError.

    They concern configuration, data or files, so a traceback is of no use.
    """
    try:
        return step(*arguments)
    except (ValueError, CheckpointError) as error:
        logger.opt(exception=error).debug("while wiring the run")
        raise ConfigError(str(error)) from error


def _start(step: Callable[..., T], *arguments: object) -> T:
    """Do a step before the first phase, with the time limit of a phase.

    While it takes long, say where it is.
    """
    # Loading can hang on a file system or on another rank, so a thread watches the time.
    limit = next(
        (60 * each.strategy.phase_minutes for each in arguments if isinstance(each, Config)),
        math.inf,
    )
    ended = threading.Event()
    began = time.monotonic()

    def watch() -> None:
        while not ended.wait(NOTICE_SECONDS):
            seconds = time.monotonic() - began
            if seconds > limit:
                cause = (
                    f"the start has taken more than {limit:.0f} s (--phase_minutes), at"
                    f" {position()}"
                )
                logger.error(f"this run ends: {cause}")
                exit_process(cause, 1)
            if local_rank() == 0:
                logger.warning(
                    "the run is still starting, after {:.0f} s, at {}", seconds, position()
                )

    threading.Thread(target=watch, name="start", daemon=True).start()
    try:
        return _as_config_error(step, *arguments)
    finally:
        ended.set()
