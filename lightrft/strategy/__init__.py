"""How a run is distributed: strategies, their optimizers and checkpoints, and the engine they host."""

from lightrft.strategy.config import Arguments, StrategyConfig, flat
from lightrft.strategy.engine_host import EngineStatus
from lightrft.strategy.fsdp import FSDPStrategy
from lightrft.strategy.strategy_base import StrategyBase

__all__ = ["EngineStatus", "FSDPStrategy", "StrategyBase", "StrategyConfig", "get_strategy"]


def get_strategy(args: Arguments = None) -> StrategyBase:
    """The strategy that `args` ask for, not yet set up: call its setup_distributed()."""
    values = flat(args)
    if not values.get("fsdp"):
        raise ValueError("without --fsdp the strategy is DeepSpeed, which is not there yet: pass --fsdp")
    named = ("seed", "max_norm", "micro_train_batch_size", "train_batch_size")
    return FSDPStrategy(args=args, **{name: values[name] for name in named if values.get(name) is not None})
