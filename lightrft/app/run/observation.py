"""Build what observes a run: the trace of the phases, and the sinks of the metrics."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lightrft.app.observe.console import console
from lightrft.app.observe.sinks import JsonLines, Observer, Sink, TensorBoard
from lightrft.app.observe.text import duration
from lightrft.app.observe.trackers import Tracker, check_login
from lightrft.app.run.model_card import check_hub
from lightrft.config.references import TRACKERS, report_names
from lightrft.config.sections import Config
from lightrft.core.metrics import Trace
from lightrft.models.parallel import device
from lightrft.strategy.strategy import StrategyBase


@contextmanager
def log_duration(strategy: StrategyBase, activity: str) -> Iterator[None]:
    """Print on rank 0 what begins, and how long it took once it is done."""
    began = time.perf_counter()
    strategy.print(f"{activity} ...")
    yield
    strategy.print(f"{activity}: done after {duration(time.perf_counter() - began)}")


def observe(config: Config, strategy: StrategyBase) -> Observer:
    """Build the observer, with sinks on rank 0 only, and the strategy's trace on every rank."""
    observer = Observer(_sinks(config) if strategy.is_rank_0() else [])

    strategy.trace = Trace(
        peak_memory=partial(device.peak_memory, strategy.device),
        memory_in_use=partial(device.memory_in_use, strategy.device),
        synchronize=partial(device.synchronize, strategy.device),
        on_phase=[strategy.announce, observer.phase],
    )
    return observer


def check_logins(config: Config, strategy: StrategyBase) -> None:
    """Raise ConfigError, on rank 0, for a tracker or a hub without a login.

    This is before data and models are loaded.
    """
    if strategy.is_rank_0():
        check_login(report_names(config.observe.report_to))
        if config.train.push_to_hub:
            check_hub(config.train.push_to_hub)


def _sinks(config: Config) -> list[Sink]:
    folder = Path(config.train.save_path)
    observe = config.observe
    sinks: list[Sink] = [console(), JsonLines(folder)]
    names = report_names(observe.report_to)
    if "tensorboard" in names:
        sinks.append(TensorBoard(folder))
    return [*sinks, *(Tracker(name, folder, observe) for name in names if name in TRACKERS)]
