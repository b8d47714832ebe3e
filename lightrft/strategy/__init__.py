"""How a run is distributed: strategies, their optimizers and checkpoints, and the engine they host."""

from typing import Any

from lightrft.config import ConfigError
from lightrft.strategy.config import Arguments, StrategyConfig, flat
from lightrft.strategy.engine_host import EngineStatus
from lightrft.strategy.fsdp import FSDPStrategy
from lightrft.strategy.named import is_actor
from lightrft.strategy.strategy_base import StrategyBase

__all__ = ["DeepSpeedStrategy", "EngineStatus", "FSDPStrategy", "StrategyBase", "StrategyConfig", "get_strategy", "is_actor"]


def get_strategy(args: Arguments = None) -> StrategyBase:
    """The strategy that `args` ask for, not yet set up: call its setup_distributed(). FSDP2 with --fsdp, else DeepSpeed."""
    values = flat(args)
    strategy = FSDPStrategy if values.get("fsdp") else _deepspeed_strategy()
    named = ("seed", "max_norm", "micro_train_batch_size", "train_batch_size")
    return strategy(args=args, **{name: values[name] for name in named if values.get(name) is not None})


def __getattr__(name: str) -> Any:
    """DeepSpeed is imported when it is asked for."""
    if name == "DeepSpeedStrategy":
        return _deepspeed_strategy()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _deepspeed_strategy() -> type[StrategyBase]:
    try:
        from lightrft.strategy.deepspeed import DeepSpeedStrategy
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise ConfigError(
            "without --fsdp the strategy is DeepSpeed, which is not installed: pip install 'lightrft[deepspeed]', or pass --fsdp"
        ) from None
    return DeepSpeedStrategy
