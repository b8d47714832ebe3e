"""Strategies, which distribute a run: models, optimizers, checkpoints, and the engine that they
host.
"""

from typing import Any

from lightrft.config.errors import ConfigError
from lightrft.config.resolve import Arguments, as_config, strategy_name
from lightrft.config.sections import Config
from lightrft.registry import Registry
from lightrft.strategy.engine_host import EngineStatus
from lightrft.strategy.fsdp import FSDPStrategy
from lightrft.strategy.strategy_base import StrategyBase, is_actor

__all__ = [
    "DeepSpeedStrategy",
    "EngineStatus",
    "FSDPStrategy",
    "StrategyBase",
    "StrategyConfig",
    "get_strategy",
    "is_actor",
]


_strategies = Registry("strategy", flag="--strategy")
_strategies.register("fsdp")(FSDPStrategy)


class StrategyConfig:
    """LightRFT's name for a strategy's configuration: it makes a Config, with `extra_args` for
    other names.
    """

    from_args = staticmethod(as_config)

    def __new__(cls, **values: Any) -> Config:
        return as_config(values)


def get_strategy(args: Arguments = None) -> StrategyBase:
    """Return the strategy that --strategy or --fsdp in `args` names; the caller still has to call
    its setup_distributed().

    The default is DeepSpeed if it is installed, else FSDP2. Raises ConfigError for a class that
    cannot be found.
    """
    config = as_config(args)
    section = config.strategy
    strategy = _class(
        strategy_name(section.strategy, section.fsdp if "fsdp" in section.written else None)
    )
    own = (
        vars(config.train) | vars(config.optim)
        if isinstance(args, Config)
        else config.extra_args | vars(config.optim)
    )
    named = ("seed", "max_norm", "micro_train_batch_size", "train_batch_size")

    return strategy(args=config, **{name: own[name] for name in named if own.get(name) is not None})


def __getattr__(name: str) -> Any:
    """Import DeepSpeed only when DeepSpeedStrategy is accessed."""
    if name == "DeepSpeedStrategy":
        return _deepspeed_strategy()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _class(name: str) -> type[StrategyBase]:
    chosen = _deepspeed_strategy() if name == "deepspeed" else _strategies[name]
    if not (isinstance(chosen, type) and issubclass(chosen, StrategyBase)):
        raise ConfigError(f"--strategy {name}: {chosen!r} is not a subclass of StrategyBase")
    return chosen


def _deepspeed_strategy() -> type[StrategyBase]:
    try:
        from lightrft.strategy.deepspeed import DeepSpeedStrategy
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise ConfigError(
            "--strategy deepspeed: DeepSpeed is not installed: `pip install deepspeed`, or shard"
            " with FSDP2: --fsdp"
        ) from None
    return DeepSpeedStrategy
