"""Strategies distribute a run: models, optimizers, checkpoints, and the engine that they host.

The public classes have the verbs of other tools too, so they come from `lightrft.compat`.
"""

from importlib import import_module
from typing import Any

from lightrft.config.errors import ConfigError
from lightrft.config.resolve import Arguments, as_config, strategy_name
from lightrft.config.sections import Config
from lightrft.registry import Registry
from lightrft.strategy.engine_host import EngineStatus
from lightrft.strategy.strategy import Strategy

_MODULES = {
    "StrategyBase": "lightrft.compat.strategy",
    "FSDPStrategy": "lightrft.compat.strategy",
    "DeepSpeedStrategy": "lightrft.compat.strategy",
    "is_actor": "lightrft.compat.strategy",
}
"""Public name -> module. The modules import this package, so they are imported only for a name."""
__all__ = [*_MODULES, "EngineStatus", "Strategy", "StrategyConfig", "get_strategy"]

_strategies = Registry("strategy", flag="--strategy")
_strategies.register_deferred("fsdp", "lightrft.compat.strategy:FSDPStrategy")


class StrategyConfig:
    """Make a Config under LightRFT's name for it, with `extra_args` for other names."""

    from_args = staticmethod(as_config)

    def __new__(cls, **values: Any) -> Config:
        return as_config(values)


def get_strategy(args: Arguments = None) -> Strategy:
    """Return the strategy that --strategy or --fsdp in `args` names, with every verb.

    Call setup_distributed() next. The default is DeepSpeed if it is installed, else FSDP2.
    Raises ConfigError for a class that cannot be found.
    """
    config = as_config(args)
    section = config.strategy
    strategy = _class(
        # --fsdp counts only if the user wrote it; otherwise what is installed decides.
        strategy_name(section.strategy, section.fsdp if "fsdp" in section.written else None)
    )

    if isinstance(args, Config):
        own = vars(config.train) | vars(config.optim)
    else:
        own = config.extra_args | vars(config.optim)
    named = ("seed", "max_norm", "micro_train_batch_size", "train_batch_size")

    return strategy(args=config, **{name: own[name] for name in named if own.get(name) is not None})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def _class(name: str) -> type[Strategy]:
    chosen = __getattr__("DeepSpeedStrategy") if name == "deepspeed" else _strategies[name]
    if not (isinstance(chosen, type) and issubclass(chosen, Strategy)):
        raise ConfigError(f"--strategy {name}: {chosen!r} is not a subclass of StrategyBase")
    return chosen
