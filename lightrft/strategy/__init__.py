"""Strategies distribute a run: models, optimizers, checkpoints, and the engine that they host."""

from importlib.util import find_spec
from typing import Any

from lightrft.config.errors import ConfigError
from lightrft.config.resolve import Arguments, as_config, strategy_name
from lightrft.config.sections import Config
from lightrft.registry import Registry
from lightrft.strategy.deepspeed import DeepSpeedStrategy
from lightrft.strategy.engine_host import EngineStatus
from lightrft.strategy.fsdp import FSDPStrategy
from lightrft.strategy.strategy import StrategyBase, is_actor

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
_strategies.register("deepspeed")(DeepSpeedStrategy)


class StrategyConfig:
    """Make a Config under LightRFT's name for it, with `extra_args` for other names."""

    from_args = staticmethod(as_config)

    def __new__(cls, **values: Any) -> Config:
        return as_config(values)


def get_strategy(args: Arguments = None) -> StrategyBase:
    """Return the strategy that --strategy or --fsdp in `args` names, with every verb.

    Call setup_distributed() next. The default is FSDP2. Other arguments than a Config are read as
    LightRFT reads them, whose default is DeepSpeed, if it is installed. Raises ConfigError for a
    class that cannot be found.
    """
    config = as_config(args)
    of_lightrft = not isinstance(args, Config) and find_spec("deepspeed")
    strategy = _class(strategy_name(config.strategy, "deepspeed" if of_lightrft else "fsdp"))

    if isinstance(args, Config):
        settings = vars(config.train) | vars(config.optim)
    else:
        settings = config.extra_args | vars(config.optim)
    named = ("seed", "max_norm", "micro_train_batch_size", "train_batch_size")

    return strategy(
        args=config, **{name: settings[name] for name in named if settings.get(name) is not None}
    )


def _class(name: str) -> type[StrategyBase]:
    if name == "deepspeed" and not find_spec("deepspeed"):
        raise ConfigError(
            "--strategy deepspeed: DeepSpeed is not installed: `pip install deepspeed`, or shard"
            " with FSDP2: --fsdp"
        )
    chosen = _strategies[name]
    if not (isinstance(chosen, type) and issubclass(chosen, StrategyBase)):
        raise ConfigError(f"--strategy {name}: {chosen!r} is not a subclass of StrategyBase")
    return chosen
