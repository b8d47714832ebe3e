"""What every door does around its work: read the configuration, start the strategy, end cleanly with an exit code."""

import faulthandler
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from loguru import logger
from transformers.utils import logging as transformers_logging

from lightrft.algorithms.advantage import estimators
from lightrft.algorithms.correction import corrections
from lightrft.algorithms.covariance import marks
from lightrft.algorithms.options import BOTH_BOUNDS, unread
from lightrft.algorithms.policy_loss import policy_losses
from lightrft.algorithms.presets import correction_bounds, recipe
from lightrft.cli import STARTED_BY
from lightrft.config import AlgorithmSection, Config, ConfigError, flags_without_effect, parse, validate
from lightrft.strategy import StrategyBase, get_strategy
from lightrft.strategy.launch import adopt_slurm, end_with_launcher, tell_launcher
from lightrft.trainer.interruption import Interrupted
from lightrft.versions import check_versions

T = TypeVar("T")

DEFAULT = AlgorithmSection.advantage_estimator
RECIPES = (
    f"The recipe of --advantage_estimator comes before the defaults that are shown here. That of {DEFAULT}, where none is named: "
    + ", ".join(f"--{name} {value}" for name, value in recipe(DEFAULT).items())
)
"""What --help says of defaults, beside those of the fields."""

USER_ERROR = 2
"""Exit code for what the user can mend: configuration and data."""

Build = Callable[[Config, StrategyBase], Callable[[], None]]
"""Wires what the door needs and returns what it does."""


def enter(door: str, build: Build, description: str | None, argv: list[str] | None = None) -> None:
    """Build, run, and leave the process: 0, 2 for what the user can mend, 128 + signal when interrupted, 1 otherwise."""
    if not faulthandler.is_enabled():
        faulthandler.enable()
    end_with_launcher(STARTED_BY)
    adopt_slurm(os.environ)
    set_up_logging()
    try:
        code = _run(door, build, description, argv)
    except ConfigError as error:
        _say_once(str(error))
        tell_launcher(str(error))
        code = USER_ERROR
    except Interrupted as interrupted:
        _say_once(str(interrupted))
        tell_launcher(str(interrupted))
        code = interrupted.exit_code
    except KeyboardInterrupt:
        code = 130
    except Exception:
        tell_launcher(traceback.format_exc())
        raise
    sys.exit(code)


def read_config(door: str, description: str | None, argv: list[str] | None) -> Config:
    """The resolved configuration: file, flags, then the recipe of the algorithm for what the user left open."""
    config, written = parse(argv, (description or "") + (RECIPES if door == "train_ppo" else ""))
    warnings_for_user = check_versions()
    algorithm = config.algorithm
    bounds = {} if algorithm.eps_clip is None else dict.fromkeys(BOTH_BOUNDS["eps_clip"], algorithm.eps_clip)
    config.expand(recipe(algorithm.advantage_estimator) | correction_bounds(algorithm.rollout_correction) | bounds, written)
    validate(config, door=door, world_size=int(os.environ.get("WORLD_SIZE", 1)))
    written = _changed(config, written)
    warnings_for_user += flags_without_effect(config, written, door)
    if door == "train_ppo":
        warnings_for_user += _for_the_user(unread, estimators, algorithm.advantage_estimator, written)
        warnings_for_user += _for_the_user(unread, policy_losses, algorithm.policy_loss, written, marks)
        if algorithm.rollout_correction is not None:
            warnings_for_user += _for_the_user(unread, corrections, algorithm.rollout_correction, written)
    for warning in warnings_for_user:
        if _first_local_rank():
            logger.warning(warning)
    return config


def _changed(config: Config, written: set[str]) -> set[str]:
    """Without those that say what would be so anyway, as a resolved configuration does of every field."""
    defaults = {name: value for section in asdict(Config()).values() for name, value in section.items()}
    values = {name: value for section in asdict(config).values() for name, value in section.items()}
    return {name for name in written if values[name] != defaults[name]}


def _run(door: str, build: Build, description: str | None, argv: list[str] | None) -> int:
    config = read_config(door, description, argv)
    strategy = _for_the_user(get_strategy, config)
    try:
        _for_the_user(strategy.setup_distributed)
        _for_the_user(build, config, strategy)()
    except Exception as error:
        _end_all(strategy, error)
        raise
    finally:
        strategy.close()
    return 0


def _end_all(strategy: StrategyBase, error: Exception) -> None:
    """Before anything is closed: other ranks may wait for this one. An interruption is met by all of them together."""
    of_the_user = isinstance(error, ConfigError)
    if not isinstance(error, Interrupted):
        strategy.fail(error, code=USER_ERROR if of_the_user else 1, brief=of_the_user)


def _for_the_user(step: Callable[..., T], *arguments: object) -> T:
    """While a run is wired, a ValueError speaks of the user's configuration or data; its traceback is of no use to them."""
    try:
        return step(*arguments)
    except ValueError as error:
        logger.opt(exception=error).debug("while wiring the run")
        raise ConfigError(str(error)) from error


def _say_once(message: str) -> None:
    """Every rank meets the same user error; one of a machine says it."""
    if _first_local_rank():
        logger.error(message)


def _first_local_rank() -> bool:
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def set_up_logging() -> None:
    """One format for all ranks, above the live display; what users cannot act on is left out."""
    rank = os.environ.get("RANK")
    place = f"rank {rank} " if rank else ""
    logger.remove()
    logger.add(
        lambda line: sys.stderr.write(line),  # looked up at every message: the live display redirects it
        format="{time:HH:mm:ss} " + place + "<level>{level: <7}</level> {message}",
        level="INFO",
        colorize=sys.stderr.isatty(),
    )
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*_tensor` is deprecated", category=FutureWarning)
